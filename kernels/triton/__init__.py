"""GPU kernels in Triton: decode over a ragged voted cache, and how much attention a prompt's entries receive.

Triton is imported on the first question, not with this module: a machine without a GPU never loads it. The functions
trust their arguments: ask ``supports_attend`` or ``supports_mass`` first.
"""

from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor

from kvpass.kernels.layout import fits

__all__ = ["attend", "attention_mass", "available", "supports_attend", "supports_mass", "why_not"]

TYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_DIM = 256
MIN_CAPABILITY = (8, 0)  # asynchronous copies and bf16 matrix instructions


@functools.cache
def why_not(device: torch.device) -> str | None:
    """The reason why the kernels cannot run on ``device``; None where they can."""
    if device.type != "cuda":
        return f"{device.type} is not a CUDA device"
    if torch.version.hip:
        return "the kernels were not compiled for AMD GPUs"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "the GPU is older than compute capability 8.0"
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    return None


def available(device: torch.device) -> bool:
    """Whether the kernels can run on ``device``."""
    return why_not(device) is None


def supports_attend(q: Tensor, k: Tensor, v: Tensor, *state: Tensor) -> bool:
    """Whether ``attend`` can take these tensors, as :func:`kvpass.kernels.layout.fits` names them."""
    small = max(q.shape[-1], v.shape[-1]) <= MAX_DIM
    return fits(TYPES, q.device, q, k, v, *state) and small and available(q.device)


def supports_mass(k: Tensor, q: Tensor) -> bool:
    """Whether ``attention_mass`` can take keys and queries like these."""
    return (
        k.device == q.device
        and k.dtype in TYPES
        and q.dtype in TYPES
        and k.stride(-1) == q.stride(-1) == 1
        and k.shape[-1] <= MAX_DIM
        and k.numel() > 0
        and q.numel() > 0
        and available(k.device)
    )


def attend(*arguments, **options) -> Tensor:
    """:func:`kvpass.kernels.triton.launch.attend`."""
    return importlib.import_module("kvpass.kernels.triton.launch").attend(*arguments, **options)


def attention_mass(*arguments, **options) -> Tensor:
    """:func:`kvpass.kernels.triton.launch.attention_mass`."""
    return importlib.import_module("kvpass.kernels.triton.launch").attention_mass(*arguments, **options)
