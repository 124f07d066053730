"""Linear layers for a few rows: what is merged computes what it did."""

import pytest
import torch
from torch.fx import GraphModule

from kvpass.kernels import cpu
from kvpass.kernels.linear import linears
from kvpass.passes.skinny import use_skinny_linears
from kvpass.passes.spec import Program

aten = torch.ops.aten


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_not()))
@torch.no_grad()
def test_a_linear_layer_behind_another_is_merged_behind_it():
    """Two layers of one input become one call, and the layer that reads one of them reads the merged result."""
    root = torch.nn.Module()
    for name in ("first", "second", "third"):
        root.register_buffer(name, torch.randn(8, 8, generator=torch.Generator().manual_seed(len(name))))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    weights = {name: graph.get_attr(name) for name in ("first", "second", "third")}
    first = graph.call_function(aten.linear.default, (x, weights["first"]))
    third = graph.call_function(aten.linear.default, (first, weights["third"]))
    second = graph.call_function(aten.linear.default, (x, weights["second"]))
    graph.output((third, second))
    module = GraphModule(root, graph)
    sample = torch.randn(1, 8, generator=torch.Generator().manual_seed(9))
    expected = module(sample)
    made = use_skinny_linears(Program(module, ()), rows=1)
    assert [node.target for node in made.module.graph.nodes].count(linears) == 2
    torch.testing.assert_close(made.module(sample), expected, rtol=1e-5, atol=1e-5)  # sums in another order
