"""Budgets are exact integers."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.budget import Budget, even_split


@pytest.mark.parametrize("value", [True, False, 0, -1, 0.0, -0.1, 1.5, float("nan"), float("inf"), "0.1", None])
def test_refuses(value):
    """Whatever is not a fraction or a count is refused in one sentence that says what is accepted."""
    with pytest.raises(ValueError, match=r"float in \(0, 1\].*int >= 1"):
        Budget.parse(value)


@pytest.mark.parametrize("rows", [1, 3, 90])
@pytest.mark.parametrize("length", [10, 20, 50, 100, 1000])
@pytest.mark.parametrize("tenths", [1, 2, 3, 7, 9, 10])
def test_tenths(tenths, length, rows):
    """A decimal budget of a round length loses nothing to binary floating point."""
    assert Budget.parse(tenths / 10).total([length], rows) == [max(rows, tenths * length * rows // 10)]


def test_rounds_down_and_keeps_one_a_row():
    """A fraction is rounded down over all rows together, and every row keeps an entry."""
    assert Budget.parse(0.3).total([7, 1, 2], 3) == [6, 3, 3]
    assert Budget.parse(0.05).total([5], 4) == [4]


def test_count():
    """An int is entries per row on average, at most the prompt."""
    assert Budget.parse(64).total([1000, 10], 3) == [192, 30]
    assert Budget.parse(1) != Budget.parse(1.0)


def test_parse_is_idempotent():
    """A parsed budget passes through."""
    budget = Budget.parse(0.25)
    assert Budget.parse(budget) is budget and budget.fraction == Fraction(1, 4)


@given(
    st.one_of(st.floats(1e-6, 1, exclude_min=True), st.integers(1, 500)),
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.integers(1, 40),
)
def test_uniform(value, lengths, rows):
    """The even split sums to the total, differs by at most one, and gives the remainder to the first rows."""
    budget = Budget.parse(value)
    split = budget.uniform(lengths, rows)
    assert split.sum(-1).tolist() == budget.total(lengths, rows)
    assert (split.amax(-1) - split.amin(-1)).max() <= 1
    assert (split.diff(dim=-1) <= 0).all()
    assert (split >= 1).all() and (split <= torch.tensor(lengths)[:, None]).all()


@given(st.integers(0, 200), st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_even_split_of_short_rows(total, available):
    """Rows too short for the even share keep everything; the rest share what is left to within one entry."""
    split = even_split(torch.tensor([total]), torch.tensor([available]))[0].tolist()
    assert sum(split) == min(total, sum(available))
    assert all(s <= a for s, a in zip(split, available, strict=True))
    open_rows = [s for s, a in zip(split, available, strict=True) if s < a]
    assert not open_rows or max(split) - min(open_rows) <= 1
