"""Frame: rotation of keys by whole positions."""

import pytest
import torch

from kvpass.kernels.frame import Frame


def half_frame(dim=8, base=10000.0):
    """Channel i turns with i + dim/2, as in most decoders."""
    half = dim // 2
    freq = base ** -(torch.arange(half, dtype=torch.float64) / half)
    return Frame(torch.arange(half), torch.arange(half, dim), freq)


def rotated(x, positions, frame):
    """The rotation written with complex numbers, in fp64."""
    angle = positions.double().unsqueeze(-1) * frame.freq
    pair = torch.complex(x[..., frame.first].double(), x[..., frame.second].double())
    pair = pair * torch.polar(torch.ones_like(angle), angle)
    out = x.double().clone()
    out[..., frame.first], out[..., frame.second] = pair.real, pair.imag
    return out


@pytest.mark.parametrize("second", [[4, 5, 6, 7], [1, 3, 5, 7], [6, 4, 7, 5]])
@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4], [30000, 5000, 7, 0, -9]])
def test_turn_rotates_each_pair(positions, second):
    """A pair moves by position times frequency, near and far, forwards and backwards, wherever its channels lie."""
    first = [channel for channel in range(8) if channel not in second]
    frame = Frame(torch.tensor(first), torch.tensor(second), half_frame().freq)
    torch.manual_seed(0)
    x, by = torch.randn(2, 3, 5, 8), torch.tensor(positions, dtype=torch.int32)
    assert torch.allclose(frame.turn(x, by).double(), rotated(x, by, frame), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_turning_back_inverts(dtype):
    """``turn(turn(x, p), -p)`` is ``x`` up to the rounding of its dtype."""
    torch.manual_seed(0)
    x, by = torch.randn(2, 2, 6, 8, dtype=dtype), torch.randint(0, 30000, (2, 1, 6))
    back = half_frame().turn(half_frame().turn(x, by), -by)
    assert back.dtype == dtype
    assert (back - x).abs().max() <= 8 * torch.finfo(dtype).eps * x.abs().max()


def test_logits_depend_on_distance_only():
    """A query and a key turned by the same positions keep their product: what rotary embeddings are for."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    by = torch.tensor([1234])
    assert torch.allclose((half_frame().turn(q, by) * half_frame().turn(k, by)).sum(), (q * k).sum())


def test_other_channels_pass_through():
    """Partial rotary: channels in no pair come back bitwise, and the input is not written to."""
    frame = Frame(torch.tensor([0]), torch.tensor([3]), torch.tensor([0.5], dtype=torch.float64))
    x = torch.randn(1, 1, 4, 6)
    before = x.clone()
    turned = frame.turn(x, torch.arange(4))
    assert torch.equal(turned[..., [1, 2, 4, 5]], x[..., [1, 2, 4, 5]])
    assert torch.equal(x, before) and not torch.equal(turned, x)


def test_empty_rows_are_no_special_case():
    """No entries, no error."""
    assert half_frame().turn(torch.zeros(2, 3, 0, 8), torch.zeros(2, 3, 0, dtype=torch.int32)).shape == (2, 3, 0, 8)
