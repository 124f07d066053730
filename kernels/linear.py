"""The operator ``kvpass::linear``: ``x W^T + b`` for the few rows of a decode step."""

from __future__ import annotations

import torch

from kvpass.kernels import cpu

_library = torch.library.Library("kvpass", "FRAGMENT")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")


@torch.library.register_fake("kvpass::linear", lib=_library)
def _fake(x, weight, bias=None):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _cpu(x, weight, bias=None):
    run = cpu.linear if cpu.supports_linear(x, weight, bias) else torch.nn.functional.linear
    return run(x, weight, bias)


_library.impl("linear", _cpu, "CPU")
_library.impl("linear", torch.nn.functional.linear, "CUDA")

linear = torch.ops.kvpass.linear.default
