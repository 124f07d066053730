"""Tasks with answers: what a compressed cache is asked, and how the answers are scored.

``TASKS[name](tokenizer, length, count, seed, data)`` gives at most ``count`` samples whose prompt has at most
``length`` tokens, what is generated not counted; the same arguments give the same samples. ``tokenizer=None`` counts
bytes. ``data`` is a folder of data files, or None. ValueError in one sentence when a task cannot be made from these.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvpass.benchmarks.tasks.babilong import babilong
from kvpass.benchmarks.tasks.counting import common_words, frequent_words
from kvpass.benchmarks.tasks.language import language, pydoc
from kvpass.benchmarks.tasks.longbench import LONGBENCH, longbench
from kvpass.benchmarks.tasks.meetings import qmsum
from kvpass.benchmarks.tasks.metrics import METRICS
from kvpass.benchmarks.tasks.needles import NEEDLES
from kvpass.benchmarks.tasks.own import own
from kvpass.benchmarks.tasks.questions import hotpot_among, hotpotqa, squad_among
from kvpass.benchmarks.tasks.sample import Sample, Tokens, encode
from kvpass.benchmarks.tasks.tracking import variable_tracking

__all__ = ["METRICS", "TASKS", "Sample", "Tokens", "encode", "own"]

Task = Callable[[Any, int, int, int, Path | None], list[Sample]]

TASKS: dict[str, Task] = {
    "language": language,
    "pydoc": pydoc,
    **{name: partial(task, name) for name, task in NEEDLES.items()},
    "vt": variable_tracking,
    "cwe": common_words,
    "fwe": frequent_words,
    "qa_1": squad_among,
    "qa_2": hotpot_among,
    "hotpotqa": hotpotqa,
    **{name: partial(longbench, name) for name in LONGBENCH},
    "qmsum": qmsum,
    "babilong_qa1": partial(babilong, "babilong_qa1"),
    "babilong_qa2": partial(babilong, "babilong_qa2"),
}
