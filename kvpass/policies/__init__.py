"""Compression policies by name. Adding one is a file and a line in ``POLICIES``."""

from __future__ import annotations

from collections.abc import Callable

from kvpass.policies.base import Policy
from kvpass.policies.keepkv import KeepKV
from kvpass.policies.reference import Reference
from kvpass.policies.snapkv import SnapKV
from kvpass.policies.streaming import Streaming

POLICIES: dict[str, Callable[[], Policy]] = {
    "streaming": Streaming,
    "snapkv": SnapKV,
    "adakv": lambda: SnapKV(allocator="layer"),
    "reference": Reference,
    "keepkv": KeepKV,
}

__all__ = ["POLICIES", "KeepKV", "Policy", "Reference", "SnapKV", "Streaming", "get"]


def get(policy: str | Policy) -> Policy:
    """A policy instance from an instance or a registered name.

    Raises:
        ValueError: for an unknown name, listing the known ones.
    """
    if isinstance(policy, Policy):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}; known: {', '.join(POLICIES)}")
    return POLICIES[policy]()
