"""Compression policies by name. Adding one is a file and a line in ``POLICIES``."""

from __future__ import annotations

from collections.abc import Callable

from kvpass.policies.base import Policy
from kvpass.policies.cam import CaM
from kvpass.policies.d2o import D2O
from kvpass.policies.duo import DuoAttention
from kvpass.policies.expected import ExpectedAttention
from kvpass.policies.gracekv import GraceKV
from kvpass.policies.h2o import H2O
from kvpass.policies.headkv import HeadKV
from kvpass.policies.keepkv import KeepKV
from kvpass.policies.kvmerger import KVMerger
from kvpass.policies.kvzip import KVzip
from kvpass.policies.matching import AttentionMatching
from kvpass.policies.oracle import Oracle
from kvpass.policies.pyramidkv import PyramidKV
from kvpass.policies.random import Random
from kvpass.policies.reference import Reference
from kvpass.policies.snapkv import SnapKV
from kvpass.policies.streaming import Streaming
from kvpass.policies.tova import TOVA
from kvpass.policies.unified import Unified

POLICIES: dict[str, Callable[[], Policy]] = {
    "streaming": Streaming,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "adakv": lambda: SnapKV(allocator="blend"),
    "h2o": H2O,
    "tova": TOVA,
    "headkv": HeadKV,
    "kvzip": KVzip,
    "expected": ExpectedAttention,
    "duo": DuoAttention,
    "reference": Reference,
    "keepkv": KeepKV,
    "matching": AttentionMatching,
    "matching_omp": lambda: AttentionMatching(keys="omp"),
    "cam": CaM,
    "d2o": D2O,
    "kvmerger": KVMerger,
    "gracekv": GraceKV,
    "unified": Unified,
    "random": Random,
    "oracle": Oracle,
}

__all__ = [
    "D2O",
    "H2O",
    "POLICIES",
    "TOVA",
    "AttentionMatching",
    "CaM",
    "DuoAttention",
    "ExpectedAttention",
    "GraceKV",
    "HeadKV",
    "KVMerger",
    "KVzip",
    "KeepKV",
    "Oracle",
    "Policy",
    "PyramidKV",
    "Random",
    "Reference",
    "SnapKV",
    "Streaming",
    "Unified",
    "get",
]


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
