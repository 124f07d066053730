"""Progress on standard error for anything that may take seconds; silent when nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def bar(items: Iterable[T], label: str) -> Iterator[T]:
    """Iterate with a progress bar, on a terminal only."""
    return tqdm(items, desc=label, leave=False, disable=not sys.stderr.isatty())
