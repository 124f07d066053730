"""Give the linear layers of a program for few tokens a kernel that reads weights at the memory's speed.

A matrix-vector product does two operations a weight, so it is bound by reading the weights; a general matrix product
library does not reach that bound for a handful of rows.
"""

from __future__ import annotations

import torch

from kvpass.kernels import cpu
from kvpass.kernels.linear import linear
from kvpass.passes.evaluate import attribute
from kvpass.passes.spec import Program

aten = torch.ops.aten


def use_skinny_linear(program: Program, rows: int) -> Program:
    """Replace ``aten.linear`` on constant weights by ``kvpass::linear`` where the kernel takes ``rows`` rows."""
    if rows > cpu.MAX_LINEAR_ROWS:
        return program
    for node in program.module.graph.nodes:
        if node.op == "call_function" and node.target is aten.linear.default and _supported(program, node):
            node.target = linear
            node.args = (*node.args, None)[:3]
    program.module.recompile()
    return program


def _supported(program: Program, node) -> bool:
    constants = [arg for arg in node.args[1:] if arg is not None]
    if any(arg.op != "get_attr" for arg in constants):
        return False
    weight, *bias = (attribute(program, arg) for arg in constants)
    example = torch.empty(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        return cpu.supports_linear(example, weight, bias[0] if bias else None)
