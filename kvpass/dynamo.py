"""``torch.compile(model, backend="kvpass", options={"budget": 0.2}, dynamic=True)``: the Dynamo front-end.

What Dynamo compiles is a function of the whole sequence, without a cache. The compiled function keeps one: a call whose
ids continue those of the call before runs only the new tokens on the compressed cache, any other call starts a new one.
For ``generate()`` use :func:`kvpass.compile`, which also sees the cache argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.fx import GraphModule

from kvpass.compiler import runtime_of
from kvpass.passes.dynamo import COLUMNS, INPUTS, Call, capture_call
from kvpass.passes.spec import KVPassError
from kvpass.runtime import Runtime


def backend(traced: GraphModule, arguments: Sequence, *, options: Mapping | None = None) -> Callable:
    """The Dynamo backend named ``kvpass``.

    Args:
        traced: one call of a decoder with ``input_ids``, ``position_ids`` and ``attention_mask``, each [B, S], and
            ``use_cache=False``, as Dynamo hands it to a backend.
        arguments: its example inputs, weights included.
        options: ``budget``, ``policy``, ``decode_budget``, ``kv_dtype`` and ``lower_with`` ("inductor" or "eager"),
            with the meanings and defaults of :func:`kvpass.compile`.

    Raises:
        UnsupportedModelError: the graph is a part of a model (a graph break), lacks an input, or cannot be rewritten.
        ValueError: an unknown option.
    """
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
        raise KVPassError("the kvpass backend computes no gradients; call the compiled model under torch.no_grad()")
    known = ("budget", "policy", "decode_budget", "kv_dtype", "lower_with")
    given = dict(options or {})
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"unknown option {unknown[0]!r}; known: {', '.join(known)}")
    call = capture_call(traced, arguments)
    runtime = runtime_of(call.captured, **given)
    return _Continuing(runtime, call)


@contextmanager
def any_batch(*inputs: Tensor) -> Iterator[None]:
    """Trace calls on ``inputs`` [B, S] for any batch and length, also from a batch of one, which Dynamo would fix."""
    import torch.fx.experimental._config as config

    for tensor in inputs:
        for axis in range(tensor.ndim):
            torch._dynamo.mark_dynamic(tensor, axis)
    with config.patch(backed_size_oblivious=True):
        yield


class _Continuing:
    """A function of whole sequences that computes only what is new since the call before."""

    def __init__(self, runtime: Runtime, call: Call):
        self.runtime, self.call = runtime, call
        self.cache = self.ids = self.mask = self.logits = None

    @torch.no_grad()
    def __call__(self, *arguments) -> tuple[Tensor]:
        for index, number in self.call.numbers.items():
            if int(arguments[index]) != number:
                raise KVPassError(
                    f"the call was traced with the integer {number} and is now given {int(arguments[index])}; "
                    "torch._dynamo.reset() lets it be traced anew"
                )
        ids, positions, mask = (arguments[self.call.at[name]] for name in INPUTS)
        keep = arguments[self.call.at[COLUMNS]] if COLUMNS in self.call.at else None
        done = self._done(ids, mask, keep)
        cache = self.cache if done else self.runtime.new_cache()
        self.cache = None  # an exception must not leave half a step behind
        new = slice(done, None)
        cache.prompt_end = cache.columns if done else ids.shape[1]
        wanted = torch.arange(ids.shape[1] - done, device=ids.device) if keep is None else keep - done
        logits = self.runtime.run(cache, ids[:, new], mask[:, new].bool(), positions[:, new], wanted)
        if keep is None:
            self.logits = logits = torch.cat([self.logits, logits], 1) if done else logits
        self.cache, self.ids, self.mask = cache, ids.clone(), mask.clone()
        return (logits.clone(),)

    def _done(self, ids: Tensor, mask: Tensor, keep: Tensor | None) -> int:
        """Columns of this call that the cache already holds; 0 when it is another text or asks for earlier logits."""
        if self.cache is None or ids.shape[0] != self.ids.shape[0] or ids.shape[1] <= self.ids.shape[1]:
            return 0
        done = self.ids.shape[1]
        if keep is not None and bool((keep < done).any()):
            return 0
        same = torch.equal(ids[:, :done], self.ids) and torch.equal(mask[:, :done], self.mask)
        return done if same else 0
