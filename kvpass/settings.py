"""The arguments of ``compile``, read before anything is traced."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvpass import policies
from kvpass.budget import Budget
from kvpass.lowering import BACKENDS
from kvpass.refresh import Refresh

KV_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`compile`, read."""

    budget: Budget
    policy: policies.Policy
    decode_budget: Budget | None
    kv_dtype: torch.dtype | None
    backend: str
    refresh: Refresh | None = None

    @staticmethod
    def parse(budget, policy, decode_budget, kv_dtype, backend, refresh=None) -> Settings:
        """Raises ValueError for a budget, policy, dtype, backend or refresh that does not exist."""
        budget, chosen = Budget.parse(budget), policies.get(policy)
        bound = None if decode_budget is None else Budget.parse(decode_budget)
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
        if chosen.wants == "continuation":
            raise ValueError(
                f"policy {chosen.name!r} judges by the tokens that follow the prompt; only an evaluation has them"
            )
        refresh = Refresh.parse(refresh)
        for name, asked in (("decode_budget", bound), ("refresh", refresh)):
            if chosen.wants == "rehearsal" and asked is not None:
                raise ValueError(
                    f"policy {chosen.name!r} rehearses the prompt and cannot judge while decoding; no {name}"
                )
        if kv_dtype is not None and kv_dtype not in KV_DTYPES:
            raise ValueError(f"unknown kv_dtype {kv_dtype!r}; known: {', '.join(KV_DTYPES)}")
        return Settings(budget, chosen, bound, KV_DTYPES.get(kv_dtype), backend, refresh)
