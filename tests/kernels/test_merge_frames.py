"""Merged keys averaged as stored, or as if all members stood at one position."""

import dataclasses

import pytest
import torch

from kvpass.kernels.frame import Frame
from kvpass.kernels.merge import merge
from tests.kernels.tiny import ADDITIVE, ASSIGN, attend, groups_of, observe, plain, random

FRAME = Frame(torch.arange(4), torch.arange(4, 8), torch.tensor([1.0, 0.3, 0.1, 0.01], dtype=torch.float64), 1.0)


def turning(q, slots=12):
    return dataclasses.replace(observe(q, slots), frame=FRAME, turns=True)


def query(width=1):
    return torch.randn(1, 1, width, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_one_key_at_many_positions_stays_that_key():
    """Members that differ by their positions only merge into the target bitwise; averaged as stored they shrink."""
    bare = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    entries = random(0, votes=False)
    entries = plain(FRAME.turn(bare.expand(1, 1, 12, 8), entries.pos), entries.v)
    kept, used, groups = groups_of(ASSIGN, 12)
    stored = entries.take(kept, used).k
    upright = merge(entries, turning(query(3)), kept, used, groups, key_frame="unrotated")
    torch.testing.assert_close(upright.k, stored)
    cached = merge(entries, turning(query(3)), kept, used, groups)
    assert (cached.k.norm(dim=-1) < stored.norm(dim=-1) - 1e-3)[groups.merged].all()


def test_the_mean_is_taken_upright_and_turned_to_the_target():
    """The stored key is the mean of un-rotated members, turned to the target's position."""
    entries, q = random(3, votes=False), query()
    kept, used, groups = groups_of({3: 1, 4: 1}, 12)
    out = merge(entries, turning(q), kept, used, groups, key_frame="unrotated")
    members = [1, 3, 4]
    weight = (q[0, 0, 0] @ entries.k[0, 0, members].T * 8**-0.5).softmax(-1)
    bare = FRAME.turn(entries.k, -entries.pos)[0, 0, members]
    torch.testing.assert_close(out.k[0, 0, 1], FRAME.turn((weight @ bare)[None], torch.tensor([1]))[0])
    assert int(out.pos[0, 0, 1]) == 1
    alone = ~groups.merged
    assert torch.equal(out.k[alone], entries.take(kept, used).k[alone])


@pytest.mark.parametrize("key_mode", ADDITIVE)
def test_the_vote_answers_for_the_stored_key(key_mode):
    """One query gets the full attention's output from the un-rotated mean as well, in any key mode."""
    entries, q = random(5), query()
    out = merge(entries, turning(q), *groups_of(ASSIGN, 12), key_mode=key_mode, key_frame="unrotated")
    full = attend(entries, q[0, 0], 8**-0.5)
    torch.testing.assert_close(attend(out, q[0, 0], 8**-0.5), full, rtol=1e-6, atol=1e-6)  # log-votes are fp32


def test_keys_that_do_not_turn_have_one_frame():
    """Without rotation both frames are the same; with one that is unknown the request is refused."""
    entries, kept = random(5), groups_of(ASSIGN, 12)
    still = [merge(entries, observe(query(), 12), *kept, key_frame=frame) for frame in ("cached", "unrotated")]
    assert torch.equal(still[0].k, still[1].k) and torch.equal(still[0].log_votes, still[1].log_votes)
    unknown = dataclasses.replace(turning(query()), frame=None)
    with pytest.raises(ValueError, match="needs to know how the keys of the layer turn with their position"):
        merge(entries, unknown, *kept, key_frame="unrotated")
    with pytest.raises(ValueError, match="key_frame must be one of cached, unrotated, got 'upright'"):
        merge(entries, unknown, *kept, key_frame="upright")
