"""The masks a layer may have, each a function of query and key position. A new one is five lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from kvpass.passes.spec import Mask

Predicate = Callable[[Tensor, Tensor, int], Tensor]  # (query position, key position, parameter) -> may see
PREDICATES: dict[str, tuple[Predicate, bool]] = {}


def predicate(name: str, parameter: bool = False):
    """Register a mask; ``parameter`` says that integers found in the graph are proposed to it."""

    def register(function: Predicate) -> Predicate:
        PREDICATES[name] = (function, parameter)
        return function

    return register


@predicate("causal")
def causal(q, k, _):
    return k <= q


@predicate("sliding", parameter=True)
def sliding(q, k, window):
    return (k <= q) & (k > q - window)


@predicate("chunked", parameter=True)
def chunked(q, k, chunk):
    return (k <= q) & (k // chunk == q // chunk)


@predicate("prefix", parameter=True)
def prefix(q, k, length):
    return (k <= q) | (k < length)


@predicate("bidirectional")
def bidirectional(q, k, _):
    return (k >= 0) & (q >= 0)


# Recognised masks that the operator can apply; the others are refused by name.
SUPPORTED: dict[str, Callable[[int], Mask]] = {
    "causal": lambda _: Mask(),
    "sliding": lambda window: Mask(window=window),
    "chunked": lambda chunk: Mask(window=chunk, chunk=chunk),
}


def candidates(numbers: Iterable[int]) -> Iterator[tuple[str, int]]:
    """Every mask with every parameter worth trying, simplest first."""
    proposals = sorted(set(numbers))
    for name, (_, parameter) in PREDICATES.items():
        for number in proposals if parameter else (0,):
            yield name, number
