"""Tasks with answers: what a compressed cache is asked, and how the answers are scored.

``TASKS[name](tokenizer, length, count, seed, data)`` gives at most ``count`` samples whose prompt has at most
``length`` tokens; the same arguments give the same samples. ``tokenizer=None`` counts bytes. ``data`` is a folder of
data files, or None. ValueError in one sentence when a task cannot be made from these.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpass.benchmarks.tasks.language import language, pydoc
from kvpass.benchmarks.tasks.metrics import METRICS
from kvpass.benchmarks.tasks.sample import Sample, Tokens, encode

__all__ = ["METRICS", "TASKS", "Sample", "Tokens", "encode"]

Task = Callable[[Any, int, int, int, Path | None], list[Sample]]

TASKS: dict[str, Task] = {
    "language": language,
    "pydoc": pydoc,
}
