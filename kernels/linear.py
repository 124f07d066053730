"""The operator ``kvpass::linears``: several ``x W^T + b`` of one x, for the few rows of a decode step."""

from __future__ import annotations

import torch

from kvpass.kernels import cpu

_library = torch.library.Library("kvpass", "FRAGMENT")
_library.define("linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]")


@torch.library.register_fake("kvpass::linears", lib=_library)
def _fake(x, weights, biases):
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


_library.impl("linears", cpu.linears, "CPU")

linears = torch.ops.kvpass.linears.default
