"""Deterministic random weights that leave the caller's random state alone."""

from collections.abc import Callable

import torch
from torch import nn

STD = 0.2
# Under this seed no tiny decoder's greedy text collapses into one repeated token.
SEED = 4


def seeded(build: Callable[[], nn.Module], seed: int = SEED) -> nn.Module:
    """Build a module and fill it with random weights fixed by `seed`; returns it in eval mode, float32, CPU.

    Matrices are drawn from N(0, STD). Vectors (biases, norm scales) keep their initial value plus the same
    noise, so that a pass which drops a bias or a norm scale changes the logits. The global random state is
    the same before and after.
    """
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # buffers may be random too
        model = build().float().eval()
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = STD * torch.randn(parameter.shape, generator=draw, dtype=torch.float32)
                parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model
