"""Layers on several threads of one core each, which waits less than one layer at a time on all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Job, Result = TypeVar("Job"), TypeVar("Result")


def in_order(work: Callable[[Job], Result], jobs: Iterable[Job], *, threads: int) -> Iterator[Result]:
    """``work`` of every job, in order, of which at most ``threads`` are under way or waiting to be taken."""
    if threads <= 1:
        yield from map(work, jobs)
        return
    grads, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()  # of this thread alone

    def alone(job: Job) -> Result:
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.set_grad_enabled(grads and not inference):
            return work(job)

    pool: deque[Future] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="kvpass") as executor:
        try:
            for job in jobs:
                if len(pool) == threads:
                    yield pool.popleft().result()
                pool.append(executor.submit(alone, job))
            while pool:
                yield pool.popleft().result()
        finally:
            for waiting in pool:
                waiting.cancel()
