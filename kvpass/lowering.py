"""From a program to something fast: the one-token program goes through Inductor, once per batch size."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvpass.passes.spec import Program


def eager(program: Program, batch: int) -> Callable:
    """The graph as it is."""
    return program.module


def inductor(program: Program, batch: int) -> Callable:
    """Inductor code for one token and a fixed batch; rows and tails may have any length without recompiling."""
    return torch.compile(program.module, dynamic=False, fullgraph=True)


BACKENDS: dict[str, Callable[[Program, int], Callable]] = {"inductor": inductor, "eager": eager}
