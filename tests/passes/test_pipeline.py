"""The pipeline as a whole: what the programs look like, and what it leaves behind."""

import json

import pytest
import torch

import kvpass
from kvpass.kernels.attend import attend
from kvpass.models.tiny import build
from kvpass.models.zoo import ZOO

EXPLAINED = """\
layer                     status    attention                mask        note
------------------------  --------  -----------------------  ----------  ------
model.layers.0.self_attn  found     4q/2kv x 16, scale 0.25  sliding(8)
model.layers.1.self_attn  found     4q/2kv x 16, scale 0.25  sliding(8)
every attention layer can be rewritten"""


def test_explain_prints_one_row_a_layer_and_changes_nothing(tiny_model):
    """explain() is a report and data; the model is the same object with the same attributes after it."""
    model = tiny_model("mistral")
    before = dict(vars(model))
    report = kvpass.explain(model)
    assert str(report) == EXPLAINED
    assert json.loads(report.to_json())["supported"] is True
    assert vars(model) == before


def test_the_mask_dies(compiled):
    """After rewriting no [S, S] tensor, padding mask or repetition of keys is left."""
    program = compiled("llama").kvpass.runtime.step
    targets = [node.target for node in program.module.graph.nodes if node.op == "call_function"]
    assert targets.count(attend) == 2
    assert "attention_mask" not in program.inputs
    assert torch.ops.aten.expand.default not in targets


def test_the_prefill_program_ends_in_a_visible_compression(compiled):
    """Printing the prefill graph shows what is observed, and `compress` as its last computation."""
    program = compiled("llama", policy="snapkv").kvpass.runtime.prefill
    nodes = list(program.module.graph.nodes)
    assert (nodes[-2].op, nodes[-2].target) == ("call_module", "compress")
    gathers = [node for node in nodes if node.target is torch.ops.aten.gather.default]
    assert len(gathers) == 2 and nodes[-2].args[0] == gathers
    assert "compress" in program.module.code and "SnapKV" in repr(program.module.compress)


def test_dump_writes_numbered_files(tiny_model, tmp_path, monkeypatch):
    """KVPASS_DUMP=dir shows the graph after each pass, with the report of the analysis so far."""
    monkeypatch.setenv("KVPASS_DUMP", str(tmp_path / "dump"))
    kvpass.explain(tiny_model("llama"))
    files = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert files == [
        "00_capture.py", "01_normalize.py", "02_find.py", "03_classify.py", "04_plan.py", "05_check_locality.py",
        "06_inputs.py",
    ]  # fmt: skip
    assert "# model.layers.0.self_attn" in (tmp_path / "dump" / "03_classify.py").read_text()


def test_compiling_twice_is_compiling_once(compiled):
    """A compiled model is compiled from its original, with the new budget."""
    first = compiled("llama", budget=0.5)
    again = kvpass.compile(first, budget=0.2, backend="eager")
    assert again.kvpass.original is first.kvpass.original
    assert again.kvpass.runtime.step is first.kvpass.runtime.step  # traced and validated once


def test_the_original_is_untouched(tiny_model, compiled):
    """The compiled model is of the same class over the same weights; the original keeps its own forward."""
    model, twin = tiny_model("llama"), compiled("llama")
    assert type(twin) is type(model)
    assert all(a is b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert "forward" not in vars(model) and "kvpass" not in vars(model)


def test_a_model_that_keeps_a_number_of_logits():
    """Where logits_to_keep takes a number only, the graph is captured without it and the logits are cut after."""
    from kvpass.models.plain import PLAIN

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = PLAIN[0]()

        def forward(self, input_ids, position_ids=None, attention_mask=None, use_cache=False, logits_to_keep=0):
            output = self.inner(input_ids, position_ids, attention_mask)
            return output.logits[:, -logits_to_keep:] if logits_to_keep else output.logits

    model = Counting().eval()
    compiled = kvpass.compile(model, budget=1.0, backend="eager")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, logits_to_keep=2).logits, model(ids)[:, -2:], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_layers_that_share_keys_have_one_cache_and_one_writer():
    """Four attentions over two pairs of keys and values: two caches, which the last reader of each appends to."""
    model = build(ZOO["gemma3n_text"], "eager")
    step = kvpass.compile(model, budget=1.0, backend="eager").kvpass.runtime.step
    sites = [node for node in step.module.graph.nodes if node.target is attend]
    stores = [site.args[4].target for site in sites]
    assert len(step.layers) == len(set(stores)) < len(sites)
    for store in set(stores):
        writes = [site.args[-1] for site, own in zip(sites, stores, strict=True) if own == store]
        assert writes == [False] * (len(writes) - 1) + [True]
    notes = [row.note for row in kvpass.explain(model).rows if row.note.startswith("reads the cache of")]
    assert len(notes) == len(sites) - len(set(stores))
