"""Shared fixtures: tiny decoders, compiled once a session."""

from __future__ import annotations

import functools
import logging

import pytest
import torch

import kvpass
from kvpass import models

torch.set_num_threads(1)
logging.getLogger("transformers").setLevel(logging.ERROR)

tiny = functools.cache(models.tiny)


@pytest.fixture(scope="session")
def tiny_model():
    """``tiny_model(name, attn)`` -> a seeded tiny decoder, the same object every time."""
    return lambda name="llama", attn="sdpa": tiny(name, attn=attn)


@pytest.fixture(scope="session")
def compiled():
    """``compiled(name, budget, policy, attn, backend)`` over the tiny decoders; tracing is shared between budgets."""

    def make(name="llama", budget=0.3, policy="keepkv", attn="sdpa", backend="eager"):
        return kvpass.compile(tiny(name, attn=attn), budget=budget, policy=policy, backend=backend)

    return make


def greedy(model, ids, steps, mask=None, **kwargs):
    """[B, S + steps] greedy tokens."""
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, pad_token_id=0, **kwargs)


def prompt(length, batch=1, seed=0):
    """[batch, length] token ids."""
    return torch.randint(3, 100, (batch, length), generator=torch.Generator().manual_seed(seed))
