"""The GPU script where there is no GPU."""

import pytest
import torch

from kvpass.benchmarks import gpu
from kvpass.kernels import reference


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(capsys, tmp_path):
    """Without a GPU nothing is measured or written: one line and its own exit code."""
    assert gpu.main(["--json", str(tmp_path / "out.json")]) == gpu.NO_GPU
    assert capsys.readouterr().out == "no GPU to check or measure the kernels on: torch sees no CUDA device\n"
    assert not any(tmp_path.iterdir())


def test_the_checks_tell_right_from_wrong():
    """The reference passes its own checks on the CPU; an output that is a little off does not."""
    smaller = {"batch": 1, "length": 5, "kv_heads": 1}
    right = gpu.check_kernels(reference.attend, "cpu", **smaller)
    wrong = gpu.check_kernels(lambda *given: reference.attend(*given) * 1.2, "cpu", **smaller)
    assert max(right.values()) == 0
    assert min(wrong.values()) > 1
