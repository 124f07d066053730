"""Biases: what a channel of the key can carry, on plain tensors."""

import pytest
import torch

from kvpass.passes.biases import slopes

LENGTH, SLOPES = 9, torch.tensor([0.5, 0.25, -0.125], dtype=torch.float64)
COLUMNS = torch.arange(LENGTH).expand(2, -1)
CAUSAL = torch.ones(2, LENGTH, LENGTH, dtype=torch.bool).tril()
ROWS = torch.ones(2, LENGTH, dtype=torch.bool)


def bias(of_key):
    """[2, 3, S, S]: a function of the key's position, and a constant of each query."""
    rows = torch.randn(2, 3, LENGTH, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return SLOPES[:, None, None] * of_key(COLUMNS.double())[:, None, None] + rows


def test_one_slope_a_head_up_to_a_constant_of_the_query():
    """A linear bias gives its slopes whatever it adds to a whole row; hidden keys may hold anything."""
    added = bias(lambda at: at).masked_fill(~CAUSAL[:, None], -3.0)
    torch.testing.assert_close(slopes(added, CAUSAL, ROWS, [COLUMNS]), SLOPES)


@pytest.mark.parametrize("of_key", [lambda at: at**2, lambda at: (at - 4).abs(), lambda at: at // 2])
def test_anything_else_has_no_slope(of_key):
    """Curved, mirrored or stepped biases are not taken for linear ones."""
    assert slopes(bias(of_key), CAUSAL, ROWS, [COLUMNS]) is None


def test_either_way_to_count_positions_is_accepted_but_not_another_slope():
    """Positions may be columns or count real tokens; slopes found before must hold in every case."""
    counted = COLUMNS.clone()
    counted[0, 4:] -= 1
    added = SLOPES[:, None, None] * counted.double()[:, None, None].expand(2, 3, LENGTH, LENGTH)
    torch.testing.assert_close(slopes(added, CAUSAL, ROWS, [COLUMNS, counted]), SLOPES)
    assert slopes(added, CAUSAL, ROWS, [COLUMNS]) is None
    assert slopes(added, CAUSAL, ROWS, [counted], 2 * SLOPES) is None
