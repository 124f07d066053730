"""The instrument on a tiny decoder: what it measures is what a plain call of the compiled model gives."""

import dataclasses

import pytest
import torch

from kvpass.benchmarks.eval import trial
from kvpass.benchmarks.eval.compare import compare
from kvpass.benchmarks.eval.metrics import fidelity
from kvpass.benchmarks.eval.prepare import Prepared
from kvpass.benchmarks.eval.record import Instrument, record
from kvpass.benchmarks.eval.settings import Protocol
from kvpass.benchmarks.tasks import Sample, encode
from kvpass.budget import Budget
from kvpass.policies import POLICIES, SnapKV, get
from tests.conftest import greedy

TEXT = (
    "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals, when it was checked by "
)
QUESTION = Sample("own", "q", "qa", "Read: ", TEXT[:80], "\nWhat fell?", ("the rain",), (), False, "match_all", 4)
WINDOW = Sample("language", "w", "language", "", TEXT[:90], "", (TEXT[90:],))
PROTOCOLS = [Protocol(aware, free) for aware in (True, False) for free in (True, False)]
ids = ["aware-free", "aware-charged", "agnostic-free", "agnostic-charged"]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=ids)
def test_everything_kept_is_the_full_cache(tiny_model, protocol):
    """At budget 1 every registered policy has the full cache's predictions: KL below 1e-6, retention 1."""
    policies = {name: get(name) for name in POLICIES}
    protocol = dataclasses.replace(protocol, attention=True)
    rows = compare(policies, [1.0], [QUESTION, WINDOW], tiny_model(), None, protocol)
    assert [(row["id"], row["policy"]) for row in rows] == [(i, name) for i in "qw" for name in POLICIES]
    for row in rows:
        assert row["kl"] < 1e-6 and abs(row["delta"]) < 1e-6
        assert row["agreement"] == 1 and row["exact"] == row["exact_full"]
        assert row["bytes"] == row["bytes_full"]
        assert max(row["attention_error"]) < 1e-5


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=ids)
def test_equal_entries(tiny_model, protocol):
    """At one budget all policies hold the same physical entries to 1 %, free ends included, and lose something."""
    rows = compare({name: get(name) for name in POLICIES}, [0.3], [QUESTION], tiny_model(), None, protocol)
    tokens = encode(QUESTION, None)
    charged = len(tokens.context)
    free = len(tokens.prefix) + len(tokens.suffix) * protocol.aware
    if not protocol.free:
        charged, free = charged + free, 0
    wanted = charged * 3 * 4 // 10 + free * 4  # 2 layers of 2 KV heads
    for row in rows:
        assert 0.99 * wanted <= row["entries"] <= row["allowed"] == wanted
        assert row["kl"] > 1e-6 and row["bytes"] < row["bytes_full"]


def test_the_same_as_the_compiled_model(tiny_model, compiled):
    """With everything charged and the question seen, the text generated is the compiled model's own."""
    protocol = Protocol(free=False, generate=True)
    (row,) = compare({"s": SnapKV()}, [0.5], [QUESTION], tiny_model(), None, protocol)
    prompt = torch.tensor([encode(QUESTION, None).prompt])
    model = compiled(budget=0.5, policy=SnapKV())
    own = greedy(model, prompt, 4)[0, prompt.shape[1] :].tolist()
    assert row["said"].encode() == bytes(own)
    assert row["said_full"].encode() == bytes(greedy(tiny_model(), prompt, 4)[0, prompt.shape[1] :].tolist())


def test_scored_tokens(tiny_model):
    """Only tokens whose prediction reads the compressed cache are scored, and they equal a plain forward's."""
    instrument = Instrument.of(tiny_model(), [])
    tokens = encode(QUESTION, None)
    whole = torch.tensor([tokens.prompt + tokens.gold])
    with torch.no_grad():
        plain = tiny_model()(whole, use_cache=False).logits[0].log_softmax(-1)
    for aware, skipped in ((True, 1), (False, 0)):
        recording = record(instrument, tokens, aware=aware, free=True)
        assert recording.gold == tokens.gold[skipped:]
        torch.testing.assert_close(recording.full, plain[len(tokens.prompt) - 1 + skipped : -1], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="nothing is left to score"):
        record(instrument, dataclasses.replace(tokens, gold=tokens.gold[:1]), aware=True, free=True)
    with pytest.raises(ValueError, match="nothing to compress"):
        record(instrument, dataclasses.replace(tokens, context=()), aware=True, free=True)


def test_without_context(tiny_model):
    """The model without context sees prefix and question, and of a mere text its last 64 tokens."""
    instrument = Instrument.of(tiny_model(), [])
    for sample, kept in ((QUESTION, 0), (WINDOW, 64)):
        tokens = encode(sample, None)
        shown = tokens.prefix + tokens.context[len(tokens.context) - kept :] + tokens.suffix + tokens.gold
        with torch.no_grad():
            plain = tiny_model()(torch.tensor([shown]), use_cache=False).logits[0].log_softmax(-1)
        recording = record(instrument, tokens, aware=True, free=True)
        torch.testing.assert_close(
            recording.without, plain[len(shown) - len(recording.gold) - 1 : -1], atol=1e-5, rtol=0
        )


def test_what_a_policy_wants(tiny_model):
    """A policy judges by the queries of what follows, or by those of what it rehearses, where it wants them."""

    class Oracle(SnapKV):
        name = "oracle"
        wants = "continuation"

        def score(self, entries, seen):
            assert seen.q_pos.min() == 6 + 80 + 11 and seen.q.shape[2] == seen.q_pos.shape[1] == 8
            return super().score(entries, seen)

    class Rehearsed(SnapKV):
        name = "rehearsed"
        wants = "rehearsal"

        def rehearsal(self, context_ids):
            return torch.cat([torch.tensor([7]), context_ids[:4]])

        def score(self, entries, seen):
            assert seen.q_pos.tolist() == [list(range(97 - 32, 97 + 5))]  # beside the prompt's last queries
            assert seen.own_pos.tolist() == [list(range(97, 97 + 5))] and seen.own_k.shape[2] == 5
            return super().score(entries, seen)

    rows = compare({"o": Oracle(), "r": Rehearsed()}, [0.3], [QUESTION], tiny_model())
    assert len(rows) == 2


@pytest.mark.slow
def test_sliding_layers(tiny_model):
    """Layers with a window keep it at every budget; everything kept is the full cache there too."""
    rows = compare({"snapkv": SnapKV()}, [1.0, 0.3], [QUESTION], tiny_model("gemma3_text"), None, Protocol(aware=False))
    assert rows[0]["kl"] < 1e-6 < rows[1]["kl"]


def test_fidelity_by_hand():
    """Two tokens of a three-word vocabulary, computed on paper."""
    full = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()
    own = torch.tensor([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25]]).log()
    without = torch.tensor([[0.125, 0.5, 0.375], [0.125, 0.125, 0.75]]).log()
    got = fidelity(own, full, without, [0, 1])
    ln2 = 0.6931471805599453
    assert got["kl"] == pytest.approx((0.5 * ln2 - 0.25 * ln2) / 2)
    assert got["nll_full"] == pytest.approx(ln2)
    assert got["nll"] == pytest.approx(1.5 * ln2) and got["delta"] == pytest.approx(0.5 * ln2)
    assert got["nll_without"] == pytest.approx(3 * ln2)
    assert got["retention"] == pytest.approx(1 - 0.5 / 2)
    assert got["agreement"] == 0.5 and not got["exact"] and got["exact_full"]
    assert fidelity(own, full, full, [0, 1])["retention"] is None


def test_shared_work_changes_nothing(tiny_model):
    """What is computed once for all budgets, or all policies, gives what each gives alone, and its time is counted."""
    policies = {name: get(name) for name in POLICIES}
    together = compare(policies, [0.5, 0.2], [QUESTION], tiny_model())
    for at, budget in enumerate((0.5, 0.2)):
        alone = compare(policies, [budget], [QUESTION], tiny_model())
        assert [row["kl"] for row in together[at::2]] == [row["kl"] for row in alone]
    assert all(row["seconds"]["compress"] > 0 for row in together)
    instrument = Instrument.of(tiny_model(), [])
    recording = record(instrument, encode(QUESTION, None), aware=True, free=True)
    first, second = (Prepared.of(recording, get(name)) for name in ("h2o", "d2o"))
    for prepared in (first, second):
        trial.compress(recording, prepared, Budget.parse(0.5))
    assert first.spared == 0 < second.spared and len(recording.known) == 2  # attention sums of two layers
