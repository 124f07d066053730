"""A refused attention as a script of its own."""

import runpy

import pytest
import torch

import kvpass
from kvpass.models import counterexamples
from kvpass.passes.capture import capture
from kvpass.passes.dump import SAMPLE, script
from kvpass.passes.evaluate import evaluate
from kvpass.passes.find import find
from kvpass.passes.normalize import normalize


def test_the_script_computes_what_the_graph_computes(tmp_path):
    """Run on its own numbers, the script gives the attention weights that the model's graph gives on the same."""
    captured = normalize(capture(counterexamples.unread_step()))
    refusal = find(captured).refusals[0]
    path = tmp_path / "refused.py"
    path.write_text(script(captured, refusal))
    values = runpy.run_path(str(path))
    graph = {node.name: node for node in captured.graph.nodes}
    feeds = {graph[name]: value for name, value in values.items() if graph.get(name) in _inputs(captured)}
    torch.testing.assert_close(values["softmax"], evaluate(captured, graph["softmax"], feeds, SAMPLE))
    assert values["softmax"].shape == (SAMPLE.batch, 4, SAMPLE.length, SAMPLE.length)
    assert "# refused here: unread step sigmoid.default between scores and softmax\nsigmoid = " in path.read_text()


def _inputs(captured):
    linear = torch.ops.aten.linear.default
    return {node for node in captured.graph.nodes if node.op == "placeholder" or node.target is linear}


def test_explain_writes_one_script_a_refused_layer(tmp_path, monkeypatch, capsys):
    """KVPASS_DUMP=dir holds one runnable script for each refused layer, whose first line says why."""
    monkeypatch.setenv("KVPASS_DUMP", str(tmp_path))
    assert not kvpass.explain(counterexamples.image_tokens()).supported
    scripts = sorted(tmp_path.glob("refused_*.py"))
    assert [path.name for path in scripts] == ["refused_blocks.0.mixer.py", "refused_blocks.1.mixer.py"]
    assert scripts[0].read_text().startswith('"""blocks.0.mixer: the mask depends on the tokens themselves (')
    runpy.run_path(str(scripts[0]))
    assert "scaled_dot_product_attention (2, 4, 17, 16)" in capsys.readouterr().out


def test_a_refusal_of_the_whole_model_has_no_script():
    """Where no node is to blame there is nothing to cut out."""
    captured = capture(counterexamples.unread_step())
    assert script(captured, kvpass.passes.spec.Refusal("is no decoder")) is None


@pytest.mark.slow
def test_masks_of_positions_are_part_of_the_script(tmp_path):
    """The prefix mask is computed in the script, not drawn: its first row sees the four tokens of the prefix."""
    captured = normalize(capture(counterexamples.prefix_lm()))
    site = find(captured).sites[0]
    path = tmp_path / "refused.py"
    path.write_text(script(captured, kvpass.passes.spec.Refusal("x", site.layer, site.anchor.name)))
    values = runpy.run_path(str(path))
    assert values[site.logits.masks[0].node.name][0, 0, 0].tolist() == [True] * 4 + [False] * 13
