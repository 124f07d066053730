"""One prefill of a sample on the full cache, with every query observed: what all policies are judged on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

import kvpass
from kvpass.budget import Budget
from kvpass.cache import RaggedCache
from kvpass.kernels.entries import Entries, Observation
from kvpass.kernels.layout import unpack
from kvpass.policies.base import Policy
from kvpass.policies.regions import Regions, split
from kvpass.runtime import Runtime

WITHOUT = 64  # tokens of a text that the model without context still sees, where there is no question


class UnscorableError(ValueError):
    """A sample that no figure can be computed for."""


@dataclass(frozen=True)
class Recorder(Policy):
    """Keeps everything, and the observations of the last prompt in ``seen``."""

    judges: tuple[Policy, ...] = ()  # whose hidden states are wanted
    seen: list[Observation] = field(default_factory=list, compare=False, repr=False)
    name: ClassVar[str] = "recorder"

    def observe(self, length: int) -> int:
        return length

    def taps(self, layers: int) -> tuple[int, ...]:
        return tuple(sorted({layer for policy in self.judges for layer in policy.taps(layers)}))

    def score(self, entries: Entries, seen: Observation) -> Tensor:
        return torch.zeros_like(entries.log_votes)

    def compress(
        self, layers: Sequence[tuple[Entries, Observation]], budget: Budget, lengths: Sequence[int]
    ) -> Iterator[Entries]:
        self.seen[:] = [seen for _, seen in layers]
        yield from (entries for entries, _ in layers)


@dataclass(frozen=True)
class Queries:
    """What one layer asked while it read the tokens at ``q_pos`` [1, W] int32, and the keys it gave them."""

    q: Tensor  # [1, Hq, W, Dk]
    q_pos: Tensor
    k: Tensor  # [1, Hkv, W, Dk]


@dataclass(frozen=True)
class Instrument:
    """A model compiled to keep everything, and to return the queries of what follows a prompt."""

    runtime: Runtime
    recorder: Recorder
    ends: tuple[int, ...] = ()  # tokens that end an answer
    vocabulary: int = 256

    @staticmethod
    def of(model: nn.Module, policies: Iterable[Policy]) -> Instrument:
        """Compile ``model`` to show what ``policies`` look at; its programs are shared with its other compilations.

        Raises:
            UnsupportedModelError: as :func:`kvpass.compile`.
            ValueError: no layer has full attention, so nothing can be compressed.
        """
        recorder = Recorder(window=1, judges=tuple(policies))
        # The decode budget makes the step program return its queries; at 1 it never compresses.
        made = kvpass.compile(model, budget=1.0, policy=recorder, decode_budget=1.0, backend="eager")
        if all(layer.window for layer in made.kvpass.runtime.layers):
            raise ValueError("every layer of this model has a sliding window, so there is nothing to compress")
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        ends = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
        return Instrument(made.kvpass.runtime, recorder, ends, model.config.get_text_config().vocab_size)

    @property
    def full(self) -> list[int]:
        """Indices of the layers that are compressed."""
        return [index for index, layer in enumerate(self.runtime.layers) if not layer.window]

    @property
    def rows(self) -> int:
        """(Layer, KV head) rows that a budget counts."""
        return sum(self.runtime.layers[index].kv_heads for index in self.full)

    def run(self, cache: RaggedCache, ids: Sequence[int], keep: Sequence[int] | None = None) -> Tensor:
        """[K, V] fp32 logits after the columns ``keep`` (all) of ``ids``; an empty cache reads them as a prompt."""
        device = next(self.runtime.step.module.parameters()).device
        columns = torch.arange(len(ids)) if keep is None else torch.tensor(keep, dtype=torch.int64)
        cache.prompt_end = cache.columns or None  # what follows a prompt is not compressed
        tokens = torch.tensor([list(ids)], device=device)
        return self.runtime.run(cache, tokens, None, None, columns.to(device))[0].float()


@dataclass(frozen=True)
class Recording:
    """Everything that happened on the full cache, up to the cut where compression takes place, and after it."""

    instrument: Instrument
    cut: int  # tokens before the cut
    prompt: tuple[int, ...]  # those tokens
    regions: Regions  # of those
    question: tuple[int, ...]  # tokens of the prompt after the cut
    rest: tuple[int, ...]  # all tokens after the cut, teacher-forced; the last one of the answer is never fed
    gold: tuple[int, ...]  # the scored tokens
    snapshot: RaggedCache  # at the cut, everything kept
    # Per full-attention layer, the free prefix, what is charged and the free question.
    parts: list[tuple[Entries, Entries, Entries]]
    seen: list[Observation]  # per full-attention layer, every query before the cut
    later: list[Queries]  # the queries of ``rest``
    end: RaggedCache  # after ``rest``, everything kept
    first: Tensor  # [V] logits at the cut
    full: Tensor  # [T, V] log-probabilities at the scored tokens
    without: Tensor  # [T, V] the same without the context
    rehearsed: dict[tuple[int, ...], list[Queries]] = field(default_factory=dict)
    known: dict[tuple, tuple] = field(default_factory=dict, repr=False)  # what policies have in common

    @property
    def middle(self) -> list[Entries]:
        """Per full-attention layer, the charged entries."""
        return [part[1] for part in self.parts]

    def observation(self, policy: Policy) -> list[Observation]:
        """What ``policy`` sees, by what it wants: the prompt's queries, a rehearsal's too, or the continuation's."""
        tapped = policy.taps(len(self.seen))
        shown = [seen if at in tapped else replace(seen, hidden=None) for at, seen in enumerate(self.seen)]
        none = torch.arange(0)
        if policy.wants == "continuation":
            return [_joined(sliced(seen, none), own) for seen, own in zip(shown, self.later, strict=True)]
        asked = policy.observe(self.cut)
        index = torch.arange(max(0, self.cut - asked), self.cut) if isinstance(asked, int) else asked
        shown = [sliced(seen, index) for seen in shown]
        if policy.wants == "rehearsal":
            shown = [_joined(seen, own) for seen, own in zip(shown, self._rehearsed(policy), strict=True)]
        return shown

    def _rehearsed(self, policy: Policy) -> list[Queries]:
        judged = self.prompt[self.regions.prefix : self.cut - self.regions.question]
        ids = tuple(policy.rehearsal(torch.tensor(judged)).tolist())
        if ids not in self.rehearsed:
            cache = self.snapshot.fork()
            self.instrument.run(cache, ids, [len(ids) - 1])
            self.rehearsed[ids] = _latest(self.instrument, cache)
        return self.rehearsed[ids]


def record(instrument: Instrument, tokens, *, aware: bool, free: bool) -> Recording:
    """Run ``tokens`` (:class:`kvpass.benchmarks.tasks.Tokens`) on the full cache.

    With ``aware`` the cut lies behind the suffix, else before it. With ``free`` prefix and suffix are exact and not
    charged. Scored are the tokens of the answer whose prediction reads the compressed cache: with nothing between cut
    and answer its first token is predicted by the prompt's own attention, and is left out.

    Raises:
        UnscorableError: nothing to compress, or nothing to score.
    """
    prefix, context, suffix, gold = (
        tuple(part) for part in (tokens.prefix, tokens.context, tokens.suffix, tokens.gold)
    )
    before = prefix + context + (suffix if aware else ())
    after = () if aware else suffix
    if not context:
        raise UnscorableError("a sample without context has nothing to compress")
    skipped = 0 if after else 1
    if len(gold) <= skipped:
        raise UnscorableError("the prompt's own attention predicts the answer's only token; nothing is left to score")
    regions = Regions(len(prefix), len(suffix) if aware else 0) if free else Regions()
    rest = after + gold[:-1]
    scored = gold[skipped:]
    kept = range(len(rest) - len(scored), len(rest))

    cache = instrument.runtime.new_cache()
    first = instrument.run(cache, before, [len(before) - 1])[0]
    seen = list(instrument.recorder.seen)
    instrument.recorder.seen.clear()
    snapshot = cache.fork()
    full = instrument.run(cache, rest, kept).log_softmax(-1)
    return Recording(
        instrument=instrument,
        cut=len(before),
        prompt=before,
        regions=regions,
        question=after,
        rest=rest,
        gold=scored,
        snapshot=snapshot,
        parts=[split(unpack(snapshot.stores[index]), regions, [len(before)]) for index in instrument.full],
        seen=seen,
        later=_latest(instrument, cache),
        end=cache,
        first=first,
        full=full,
        without=_without(instrument, prefix, context, suffix, gold, len(scored)),
    )


def _without(instrument: Instrument, prefix, context, suffix, gold, scored: int) -> Tensor:
    """Log-probabilities at the scored tokens without the context; of a mere text its end stays."""
    shown = (prefix + suffix if suffix else prefix + context[-WITHOUT:]) + gold[:-1]
    logits = instrument.run(instrument.runtime.new_cache(), shown, range(len(shown) - scored, len(shown)))
    instrument.recorder.seen.clear()
    return logits.log_softmax(-1)


def _latest(instrument: Instrument, cache: RaggedCache) -> list[Queries]:
    held, end = cache.recent[-1], cache.tails[0].cursor
    begin = end - held.pos.shape[1]
    return [Queries(held.queries[index], held.pos, cache.keys[index][:, :, begin:end]) for index in instrument.full]


def _joined(seen: Observation, own: Queries) -> Observation:
    """``seen`` and the queries of tokens after the prompt, which see each other too."""
    q, q_pos = torch.cat([seen.q, own.q], 2), torch.cat([seen.q_pos, own.q_pos], 1)
    return replace(seen, q=q, q_pos=q_pos, own_k=own.k, own_pos=own.q_pos)


def sliced(seen: Observation, index: Tensor) -> Observation:
    """The observed queries ``index`` [W], which are positions of a prompt that was observed as a whole."""
    if len(index) == seen.q.shape[2]:
        return seen
    index = index.to(seen.q.device)
    return replace(seen, q=seen.q.index_select(2, index), q_pos=seen.q_pos.index_select(1, index))
