"""What of a policy's work does not depend on the budget, or on the policy: done once a sample, and its time counted
wherever it would have been done."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.benchmarks.eval.record import Recording
from kvpass.kernels.entries import Entries, Observation
from kvpass.policies.base import Policy


@dataclass
class Prepared:
    """A policy on one recording. Its ``prompt_only`` methods run once for each argument, its ``field_free`` ones once
    for all policies that inherit them."""

    policy: Policy  # a copy that remembers
    layers: list[tuple[Entries, Observation]]  # what it judges, which is also what it is asked about at every budget
    spared: float = 0.0  # seconds that remembering has saved

    @staticmethod
    def of(recording: Recording, policy: Policy) -> Prepared:
        """``policy`` with what it wants to see of ``recording``, rehearsal included."""
        layers = list(zip(recording.middle, recording.observation(policy), strict=True))
        made = Prepared(copy.copy(policy), layers)
        own: dict = {}
        for names, known in ((policy.prompt_only, own), (policy.field_free, recording.known)):
            for name in names:
                object.__setattr__(made.policy, name, made._remembering(getattr(made.policy, name), known))
        return made

    def _remembering(self, method: Callable, known: dict[tuple, tuple]) -> Callable:
        """``method``, whose results are looked up in ``known``: -> result, seconds, arguments."""

        @torch.no_grad()
        def run(*given):
            key = (method.__func__, *map(_identity, given))
            if key not in known:
                started, spared = time.perf_counter(), self.spared
                result = method(*given)
                seconds = time.perf_counter() - started + self.spared - spared
                known[key] = (result, seconds, given)  # arguments are kept alive, so no id is used twice
            else:
                self.spared += known[key][1]
            result = known[key][0]
            return result.clone() if isinstance(result, Tensor) else [part.clone() for part in result]

        return run


def _identity(given) -> tuple | int:
    """The same for entries and observations of the same tensors: each policy has objects of its own."""
    return tuple(map(id, vars(given).values())) if isinstance(given, (Entries, Observation)) else id(given)
