"""What of a policy's work does not depend on the budget: done once a sample, and its time counted at every budget."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvpass.benchmarks.eval.record import Recording
from kvpass.kernels.entries import Entries, Observation
from kvpass.policies.base import Policy


@dataclass
class Prepared:
    """A policy on one recording. Its ``prompt_only`` methods run once for each argument."""

    policy: Policy  # a copy that remembers
    layers: list[tuple[Entries, Observation]]  # what it judges, which is also what it is asked about at every budget
    spared: float = 0.0  # seconds that remembering has saved
    known: dict[tuple, tuple] = field(default_factory=dict, repr=False)  # -> result, seconds, arguments

    @staticmethod
    def of(recording: Recording, policy: Policy) -> Prepared:
        """``policy`` with what it wants to see of ``recording``, rehearsal included."""
        layers = list(zip(recording.middle, recording.observation(policy), strict=True))
        made = Prepared(copy.copy(policy), layers)
        for name in policy.prompt_only:
            object.__setattr__(made.policy, name, made._remembering(name, getattr(policy, name)))
        return made

    def _remembering(self, name: str, method: Callable) -> Callable:
        @torch.no_grad()
        def run(*given):
            key = (name, *(id(part) for part in given))  # kept alive below, so no id is used twice
            if key not in self.known:
                started = time.perf_counter()
                result = method(*given)
                self.known[key] = (result, time.perf_counter() - started, given)
            else:
                self.spared += self.known[key][1]
            result = self.known[key][0]
            return result.clone() if isinstance(result, Tensor) else [part.clone() for part in result]

        return run
