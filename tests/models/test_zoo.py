"""The zoo: every row, under each attention implementation it has, compiled and held against the untouched model.

What a row does is committed too, as the data of the README's table; the same check runs here and must say the same.
"""

import pytest
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvpass.benchmarks import coverage
from kvpass.models.zoo import ZOO

SUPPORTED = [(row.name, attn) for row in ZOO.values() if not row.refused for attn in row.checked]
REFUSED = [(row.name, attn) for row in ZOO.values() if row.refused for attn in row.checked]
NAMED = """
llama mistral ministral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text gemma3n_text vaultgemma phi
phi3 phimoe gpt2 gpt_neo gpt_neox gpt_neox_japanese gptj gpt_bigcode gpt_oss opt bloom falcon falcon_alibi mpt
stablelm starcoder2 olmo olmo2 olmo3 flex_olmo cohere cohere2 glm glm4 glm4_moe granite granitemoe nemotron persimmon
codegen deepseek_v2 deepseek_v3 smollm3 llama4_text exaone4 ernie4_5 xglm biogpt dbrx arcee helium apertus seed_oss
hunyuan_v1_dense diffllama bitnet doge dots1 longcat_flash jetmoe ctrl jamba bamba zamba2 lfm2 mamba2 minimax
qwen3_next t5 prefix_lm image_tokens
""".split()  # noqa: SIM905
RENEW = "make coverage"


@pytest.fixture(scope="module")
def committed():
    """The results that the README's table is made from: versions, rows and families tried."""
    return coverage.read()


def _same_as_committed(outcome, committed) -> bool:
    """Whether a row did what the table says; another transformers may have other layers, and has its own results."""
    if committed["versions"]["transformers"] != transformers_version:
        return True
    return outcome in committed["rows"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attn"), SUPPORTED)
def test_budget_one_is_exact(name, attn, committed):
    """Every attention is found and its mask known; at budget 1.0 a batch of 40-token prompts, one padded on the left,
    gives the untouched model's 24 greedy tokens; at budget 0.3 entries are within budget, logits finite and the first
    token the same."""
    outcome = coverage.check(ZOO[name], attn)
    assert (outcome.status, outcome.reason) == ("identical", "")
    assert _same_as_committed(outcome, committed), RENEW


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attn"), REFUSED)
def test_refused_word_for_word(name, attn, committed):
    """What cannot be compiled soundly is refused for the reason in its row, and the model is as it was."""
    outcome = coverage.check(ZOO[name], attn)
    assert (outcome.status, outcome.reason) == ("refused", ZOO[name].refused)
    assert _same_as_committed(outcome, committed), RENEW


def test_the_families_that_were_asked_for_have_rows():
    """The zoo holds every family that its purpose names."""
    assert set(NAMED) <= set(ZOO)


def test_every_family_is_in_a_row_or_tried():
    """A family that a newer transformers brings is tried by itself: rows and `untabled` together are its mapping."""
    rows = {row.model_type for row in ZOO.values()}
    assert rows | set(coverage.untabled()) >= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert not rows & set(coverage.untabled())


def test_the_committed_results_are_of_this_zoo(committed):
    """The table's data hold every row in the zoo's order and, of the same transformers, every family tried."""
    rows = [(outcome.row, outcome.attn) for outcome in committed["rows"]]
    assert rows == [(row.name, attn) for row in ZOO.values() for attn in row.checked], RENEW
    if committed["versions"]["transformers"] == transformers_version:
        assert {outcome.row for outcome in committed["tried"]} <= set(coverage.untabled()), RENEW
