"""A trace made functional in place computes what a second trace would, or is left to it."""

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from kvpass.models.tiny import build
from kvpass.models.zoo import ZOO
from kvpass.passes import capture
from kvpass.passes.functional import functional


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def traced(function, x, dynamic=True):
    shapes = ({0: Dim.DYNAMIC},) if dynamic else None
    return capture.unlifted(export(Call(function), (x,), dynamic_shapes=shapes, strict=False))


def targets(module):
    return {str(node.target) for node in module.graph.nodes if node.op == "call_function"}


def in_place_on_a_sum(x):
    y = x + 1
    y *= 2
    return y.masked_fill_(y > 3, 0.0) + y


def in_place_on_a_top_value(x):
    values, indices = x.topk(2, -1)
    before = values.sum(-1, keepdim=True)
    values /= before
    return values * indices, before


def shapes_and_types(x):
    halves = x.transpose(0, 1).contiguous().flatten(0, 1).chunk(2, 0)
    return halves[0].to(torch.float64).to(torch.float32), halves[1][:1].expand_as(halves[0])


@pytest.mark.parametrize("function", [in_place_on_a_sum, in_place_on_a_top_value])
def test_writes_to_what_nobody_else_holds(function):
    """An operator that writes to a fresh tensor becomes the one that returns a new tensor, and later readers see it."""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    module = traced(function, x)
    assert any("_." in target for target in targets(module))
    assert functional(module.graph)
    module.recompile()
    assert not any("_." in target for target in targets(module))
    torch.testing.assert_close(module(x), function(x), rtol=0, atol=0)


def test_conversions_and_views():
    """Conversions, layouts, chunks and composite views are spelled with operators that do one thing."""
    x = torch.randn(6, 1, generator=torch.Generator().manual_seed(0))
    static = traced(shapes_and_types, x, dynamic=False)
    assert functional(static.graph)
    static.recompile()
    assert not targets(static) & {"aten.to.dtype", "aten.contiguous.default", "aten.chunk.default"}
    shown = [part.reshape(-1) for part in static(x)]
    expected = [part.reshape(-1) for part in shapes_and_types(x)]
    torch.testing.assert_close(shown, expected, rtol=0, atol=0)


def through_a_view(x):
    y = x + 1
    y[:2] = 0
    return y


def seen_through_a_view(x):
    y = x + 1
    first = y[0]
    y.mul_(2)
    return first


def to_an_input(x):
    x.add_(1)
    return x * 2


def with_promotion(x):
    y = x.to(torch.bfloat16)
    y *= x
    return y


@pytest.mark.parametrize("function", [through_a_view, seen_through_a_view, to_an_input, with_promotion])
def test_what_others_hold_is_left_to_a_second_trace(function):
    """A write that a view, an input or a wider type could notice leaves the graph as it was."""
    module = traced(function, torch.randn(5, 4))
    before = str(module.graph)
    assert not functional(module.graph)
    assert str(module.graph) == before


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2", "glm", "gpt_neox_japanese"])
def test_decoders_are_traced_once(name, monkeypatch):
    """The usual decoders need no second trace."""

    def again(*_):
        raise AssertionError("traced twice")

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", again)
    capture.capture(build(ZOO[name], ZOO[name].checked[-1]))
