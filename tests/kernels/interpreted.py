"""Runs the Triton kernels in Triton's interpreter, in a process of its own: it is chosen before Triton is imported.

``python -m tests.kernels.interpreted`` prints, as JSON, how far each case is from what it must equal.
"""

import itertools
import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from kvpass.kernels import reference, score
from kvpass.kernels.triton import launch
from tests.kernels.test_attend import BATCH, KV_HEADS, clone, state
from tests.kernels.test_score import example

SMALL = launch.Config(chunk=16, block=16)
CASES = {}


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


def attend(arguments, plan=SMALL):
    return launch.attend(*clone(arguments), plan=plan)


def apart(a, b):
    """Largest difference; not a number counts as far."""
    return (a.double() - b.double()).abs().nan_to_num(1e9).max().item() if a.numel() else 0.0


def off(arguments, plan=SMALL):
    """Largest difference from the reference, the tail included."""
    ours, theirs = clone(arguments), clone(arguments)
    pairs = [(launch.attend(*ours, plan=plan), reference.attend(*theirs)), (ours[9], theirs[9]), (ours[10], theirs[10])]
    return max(apart(a, b) for a, b in pairs)


def cut(arguments, width, value_dim=None):
    """The same with head dimension ``width``."""
    changed = list(arguments)
    for index in (0, 1, 4, 9):
        changed[index] = torch.randn(*arguments[index].shape[:-1], width).to(arguments[index].dtype)
    for index in (2, 5, 10):
        changed[index] = torch.randn(*arguments[index].shape[:-1], value_dim or width).to(arguments[index].dtype)
    return changed


@case
def rows_of_any_length():
    return max(off(state(stored=lengths)) for lengths in ((20, 0, 3), (0, 0, 0)))


@case
def several_tokens_and_padding():
    return off(state(length=4, slots=20))


@case
def windows_and_rings():
    return max(
        off(state(window=5, slots=5, filled=8, length=length, stored=(0, 0, 0))) for length in (1, 6)
    )  # fmt: skip


@case
def chunks():
    return off(state(window=4, chunk=4, length=6, slots=4, stored=(0, 0, 0), writes=False))


@case
def no_tail():
    arguments = state(slots=1, filled=0)
    for index, dimension in ((9, 2), (10, 2), (11, 1)):
        arguments[index] = arguments[index].narrow(dimension, 0, 0)
    return off(arguments)


@case
def group_sizes():
    return max(off(state(group=group, stored=(3, 2, 0), slots=6)) for group in (1, 5, 16))


@case
def head_dims():
    arguments = state(stored=(3, 2, 0), slots=6)
    return max(off(cut(arguments, *dims)) for dims in ((80,), (96,), (13, 40)))


@case
def softcap_and_sinks():
    worst = 0.0
    for softcap, sinks in ((5.0, False), (0.0, True), (5.0, True)):
        arguments = state(length=2)
        arguments[15] = softcap
        arguments[16] = torch.randn(KV_HEADS * 2) if sinks else None
        worst = max(worst, off(arguments))
    return worst


@case
def half_precision():
    return off(state(dtype=torch.float16))


@case
def bfloat16():
    return off(state(dtype=torch.bfloat16))


@case
def an_fp16_cache_of_an_fp32_model():
    arguments = state()
    for index in (4, 5, 9, 10):
        arguments[index] = arguments[index].half()
    return off(arguments)


@case
def integer_votes_repeat_entries():
    arguments = state(stored=(4, 4, 4))
    votes = torch.tensor([1, 2, 3, 5])[torch.arange(len(arguments[6])) % 4]
    voted, repeated = clone(arguments), clone(arguments)
    voted[6] = votes.float().log()
    repeated[4], repeated[5] = (arguments[i].repeat_interleave(votes, 0) for i in (4, 5))
    repeated[6] = torch.zeros(int(votes.sum()))
    ends = votes.cumsum(0)[(arguments[7] + arguments[8] - 1).flatten()]
    repeated[7] = torch.cat([ends.new_zeros(1), ends[:-1]]).view(BATCH, KV_HEADS)
    repeated[8] = (ends - repeated[7].flatten()).view(BATCH, KV_HEADS).int()
    return apart(attend(voted), attend(repeated))


@case
def order_of_entries():
    arguments = state(stored=(20, 20, 20))
    turned = clone(arguments)
    for start, length in zip(arguments[7].flatten().tolist(), arguments[8].flatten().tolist(), strict=True):
        for index in (4, 5, 6):
            turned[index][start : start + length] = arguments[index][start : start + length].flip(0)
    return apart(attend(arguments), attend(turned))


@case
def how_keys_are_split():
    arguments = state(stored=(40, 9, 20))
    plans = [launch.Config(16, 16), launch.Config(128, 64)]
    results = [attend(arguments, plan) for plan in plans]
    return max(apart(a, b) for a, b in itertools.combinations(results, 2))


@case
def repeated_runs_differ_by():
    arguments = state(stored=(20, 9, 3))
    return apart(attend(arguments), attend(arguments))


@case
def slack_is_never_read():
    arguments = state(length=2, slots=12)
    worst = 0.0
    for poison in (torch.nan, 1e4):
        poisoned = clone(arguments)
        for index in (4, 5, 6):
            gap = torch.full((5, *arguments[index].shape[1:]), poison)
            poisoned[index] = torch.cat([gap, arguments[index], gap])
        poisoned[7] = arguments[7] + 5
        poisoned[9][:, :, 5:], poisoned[10][:, :, 5:] = poison, poison
        worst = max(worst, apart(attend(arguments), attend(poisoned)))
    return worst


@case
def dead_rows_see_the_tail_alone():
    arguments = state(stored=(20, 5, 3))
    empty = clone(arguments)
    arguments[6][:] = -torch.inf
    empty[8][:] = 0
    return apart(attend(arguments), attend(empty))


@case
def nothing_seen_gives_zeros():
    arguments = state(stored=(0, 0, 0), filled=0)
    arguments[3][:] = -1
    arguments[16] = torch.ones(KV_HEADS * 2)
    result = attend(arguments)
    return apart(result, torch.zeros_like(result))


@case
def rows_that_share_entries():
    arguments = state(stored=(20, 10, 5))
    arguments[7], arguments[8] = torch.zeros_like(arguments[7]), torch.full_like(arguments[8], len(arguments[6]))
    return off(arguments)


@case
def attention_mass():
    worst = 0.0
    for causal, chunk in ((True, 64), (False, 32)):
        entries, seen = example(torch.float32, slots=40, width=18, dim=12)
        actual = launch.attention_mass(
            entries.k, entries.log_votes, entries.pos, seen.q, seen.q_pos, seen.scale, causal, chunk=chunk
        )
        expected = score.attention_mass(entries, seen, causal=causal, per_head=True)
        worst = max(worst, apart(actual, expected))
    return worst


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps({name: run() for name, run in CASES.items()}))
