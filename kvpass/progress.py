"""Progress on standard error for anything that may take seconds; silent when nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def bar(items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """Iterate with a progress bar, on a terminal only; ``total`` is for items without a length."""
    return tqdm(items, desc=label, total=total, leave=False, disable=not sys.stderr.isatty())
