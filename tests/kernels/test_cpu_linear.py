"""The CPU linear kernel for a few rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear as torch_linear

from kvpass.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.why_not()))

TYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("shape", [(576, 192), (192, 577), (64, 3), (13, 70), (1, 1), (65, 200)])
def test_agrees_with_fp64(rows, shape):
    """Any few rows times any weight, with and without bias."""
    x, weight, bias = torch.randn(rows, shape[0]), torch.randn(shape[1], shape[0]), torch.randn(shape[1])
    for b in (None, bias):
        want = torch_linear(x.double(), weight.double(), None if b is None else b.double())
        torch.testing.assert_close(cpu.linear(x, weight, b).double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("weight_type", TYPES)
def test_types(x_type, weight_type):
    """Input and weight types are independent; the output has the input's; sums are fp32."""
    x, weight, bias = torch.randn(2, 96).to(x_type), torch.randn(50, 96).to(weight_type), torch.randn(50)
    y = cpu.linear(x, weight, bias.to(weight_type))
    want = torch_linear(x.double(), weight.double(), bias.to(weight_type).double())
    assert y.dtype == x_type
    torch.testing.assert_close(y.double(), want, rtol=TOLERANCE[x_type], atol=10 * TOLERANCE[x_type])


def test_shapes_and_strides():
    """Leading dimensions are kept and the input need not be contiguous."""
    weight = torch.randn(20, 32)
    for x in (torch.randn(32), torch.randn(2, 3, 32), torch.randn(1, 1, 32), torch.randn(32, 4).t()):
        y = cpu.linear(x, weight)
        assert y.shape == (*x.shape[:-1], 20)
        torch.testing.assert_close(y, torch_linear(x, weight), rtol=1e-5, atol=1e-4)


def test_bits_do_not_depend_on_threads_or_rows():
    """An output's bits depend on its row of x and its row of the weight, not on what else is computed."""
    x, weight = torch.randn(5, 576), torch.randn(1001, 576)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        y = cpu.linear(x, weight)
        assert all(torch.equal(cpu.linear(x, weight), y) for _ in range(10))
        torch.set_num_threads(1)
        assert torch.equal(cpu.linear(x, weight), y)
        assert torch.equal(cpu.linear(x[3:4], weight[7:10]), y[3:4, 7:10])
    finally:
        torch.set_num_threads(threads)


def test_support():
    """The predicate refuses what the kernel cannot take or is too slow for."""
    x, weight = torch.randn(8, 16), torch.randn(4, 16)
    assert cpu.supports_linear(x, weight) and cpu.supports_linear(x, weight, torch.randn(4))
    assert not cpu.supports_linear(torch.randn(9, 16), weight)
    assert not cpu.supports_linear(x, torch.randn(16, 4).t())
    assert not cpu.supports_linear(x.double(), weight)
    assert not cpu.supports_linear(x, weight.clone().requires_grad_())
    assert not cpu.supports_linear(x.to("meta"), weight)


def test_stream_reads_everything():
    """The bandwidth probe reads what it claims to read."""
    assert cpu.read_stream(torch.ones(4096 * 64)) == 4096 * 64
