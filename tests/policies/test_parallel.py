"""Work on several threads comes back in order, under the caller's modes, and its errors reach the caller."""

import threading

import pytest
import torch

from kvpass.policies.parallel import in_order


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_come_in_order(threads):
    """Whatever finishes first, results are in the order of the jobs, and no more jobs than threads are ahead."""
    taken, begun = [], []

    def work(job):
        begun.append(job)
        return 2 * job

    for result in in_order(work, range(9), threads=threads):
        taken.append(result)
        assert len(begun) <= len(taken) + threads
    assert taken == [2 * job for job in range(9)]


def test_modes_are_the_callers():
    """Gradients and inference mode are as where the call came from, and each worker has one core."""

    def modes(_):
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), threading.current_thread().name

    with torch.no_grad():
        assert all(seen[:2] == (False, False) for seen in in_order(modes, range(4), threads=2))
    with torch.inference_mode():
        assert all(seen[:2] == (False, True) for seen in in_order(modes, range(4), threads=2))
    before = torch.get_num_threads()
    assert list(in_order(lambda _: torch.get_num_threads(), range(4), threads=2)) == [1] * 4
    assert torch.get_num_threads() == before


def test_errors_reach_the_caller():
    """The first failing job raises where its result is taken, and no thread is left."""

    def work(job):
        if job == 2:
            raise ValueError("no")
        return job

    results = in_order(work, range(9), threads=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="no"):
        next(results)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvpass")]
