"""How far each layer's attention output is off, for the continuation's own queries."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from kvpass.benchmarks.eval.record import Queries, Recording
from kvpass.benchmarks.eval.trial import Trial
from kvpass.kernels.attend import attend
from kvpass.kernels.layout import Store
from kvpass.passes.evaluate import attribute
from kvpass.passes.rewrite import STATE, state_name

SETTINGS = 4 + len(STATE) + 2  # arguments of `attend` before the scale: q, k, v, q_pos, the state, the tail's labels


@torch.no_grad()
def output_errors(recording: Recording, trial: Trial) -> list[float]:
    """Per full-attention layer ``|o - o_full| / |o_full|`` (Frobenius) over the queries after the cut.

    Queries, and the keys and values of the tokens after the cut, are those of the full cache in both, so each layer is
    judged alone and no error carries over from the layers below.
    """
    errors = []
    step = recording.instrument.runtime.step
    # The first attention of each cache, where several share one.
    sites = {node.args[4].target: node for node in reversed(list(step.module.graph.nodes)) if node.target is attend}
    for at, index in enumerate(recording.instrument.full):
        seen = recording.later[at]
        count = seen.q.shape[2]
        k, v = (held[index][:, :, :count] for held in (recording.end.keys, recording.end.values))
        given = sites[state_name(index, STATE[0])].args[SETTINGS:]
        settings = [attribute(step, value) if isinstance(value, Node) else value for value in given]
        full, own = (
            _output(seen, k, v, store, settings)
            for store in (recording.snapshot.stores[index], trial.cache.stores[index])
        )
        errors.append(float((own - full).norm() / full.norm().clamp(min=torch.finfo(full.dtype).tiny)))
    return errors


def _output(seen: Queries, k: Tensor, v: Tensor, store: Store, settings: list) -> Tensor:
    """[1, Hq, W, Dv] attention of the queries over a store, and causally over their own keys and values."""
    nothing = torch.full_like(seen.q_pos, -1)
    first = torch.zeros(1, dtype=torch.int64, device=k.device)
    packed = (store.k, store.v, store.log_votes, store.row_start, store.row_len)
    scratch = (torch.zeros_like(k), torch.zeros_like(v), nothing, first)
    return attend(seen.q, k, v, seen.q_pos, *packed, *scratch, *settings)
