"""What an evaluation measures. Nothing heavy is imported here: the command line reads it for its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Protocol:
    """What a sample is measured under; printed with every table."""

    aware: bool = True  # the policy may look at the question
    free: bool = True  # prefix and question are exact and not charged, else everything is charged
    gold: int = 128  # tokens of an answer that are forced, at most
    generate: bool = False  # also decode greedily and score the text with the task's metric
    attention: bool = False  # also the error of every layer's attention output

    def __str__(self) -> str:
        asked = (
            "aware: the policy sees the question" if self.aware else "agnostic: the policy does not see the question"
        )
        ends = "prefix and question exact and free" if self.free else "everything charged"
        return f"{asked}; {ends}; the recent window is charged"


@dataclass(frozen=True)
class Settings:
    """One evaluation: every policy at every budget on every sample."""

    model: str = "smollm2"  # a name or a checkpoint's directory
    policies: tuple[str, ...] = ()  # all registered ones when empty
    budgets: tuple[float | int, ...] = (0.5, 0.2, 0.1, 0.05)
    tasks: tuple[str, ...] = ("language", "niah_single_2", "niah_multikey_1", "niah_multivalue", "vt")
    lengths: tuple[int, ...] = (2048,)  # tokens of the prompt, at most
    samples: tuple[int, ...] = (8,)  # of each task at each length, or one number for each length
    seed: int = 0
    data: Path | None = None  # data files for the tasks that read some
    jsonl: Path | None = None  # own questions, instead of tasks
    few: tuple[tuple[str, int], ...] = ()  # policies measured on only so many samples of a family at each length
    minutes: float | None = None  # after them no sample is begun
    jobs: int = 2  # processes with one thread each
    protocol: Protocol = Protocol()

    def check(self) -> None:
        """Refuse what cannot be measured, before any work.

        Raises:
            ValueError: a count below 1, a file that is not there, or a budget, policy or task that does not exist.
        """
        from kvpass import policies
        from kvpass.benchmarks.tasks import TASKS
        from kvpass.budget import Budget

        counts = [("jobs", self.jobs), ("gold", self.protocol.gold)]
        counts += [(name, value) for name in ("samples", "lengths") for value in getattr(self, name)]
        for name, value in counts:
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if len(self.samples) not in (1, len(self.lengths)):
            raise ValueError(f"samples must be one number or one for each length, got {list(self.samples)}")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes must be above 0, got {self.minutes}")
        for budget in self.budgets:
            Budget.parse(budget)
        for policy in (*self.policies, *dict(self.few)):
            policies.get(policy)
        for policy, count in self.few:
            if count < 1 or (self.policies and policy not in self.policies):
                raise ValueError(f"few is a measured policy and at least one sample, got {policy}={count}")
        for task in self.tasks:
            if task not in TASKS:
                raise ValueError(f"unknown task {task!r}; known tasks: {', '.join(TASKS)}")
        if self.data is not None and not self.data.is_dir():
            raise ValueError(f"{self.data}: no such directory of data")
        if self.jsonl is not None and not self.jsonl.is_file():
            raise ValueError(f"{self.jsonl}: no such file")
