"""How a site's keys turn with their position, read by evaluation and checked by it: any spelling of a rotation.

The sub-graph from the projections behind a key to the key is run in fp64 on random activations. The key at position 0
is the un-rotated key; where the same activations give other keys at other positions, the map between the two is solved
for, and must be one rotation per pair of channels whose angle is proportional to the position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from kvpass.kernels.frame import Frame
from kvpass.passes.evaluate import Unevaluable, attribute, backward_slice, concrete, evaluate, substitution
from kvpass.passes.layouts import to_canonical
from kvpass.passes.sources import common_ancestors, projections
from kvpass.passes.spec import Captured, Site, Sizes

aten = torch.ops.aten
FARTHEST = 1 << 15  # positions up to here are tried; fewer where the model keeps a shorter table
COUPLED = 1e-5  # channels with a smaller share in each other are not a pair
EXACT = 1e-5  # relative error of a rotation whose tables are fp32
# Relative error per position: an fp32 angle is off by up to half an ulp of the position, which a table freezes in.
DRIFT = 2.5e-7


class Unturnable(Exception):
    """The keys depend on their position in a way that is no rotation by it."""


@dataclass(frozen=True)
class Turning:
    """What is known about the keys of one site."""

    turns: bool
    frame: Frame | None = None
    note: str = ""


def read_turning(captured: Captured, site: Site, active: frozenset[Node]) -> Turning:
    """The rotation of the site's keys; without one, why. Never refuses a model."""
    try:
        key = _Key(captured, site, active)
        if not key.placed:
            return Turning(False)
        frame = _read(key)
        return Turning(frame is not None, frame)
    except (Unturnable, Unevaluable) as failure:
        return Turning(True, note=f"keys depend on positions, and no rotation could be read: {failure}")


class _Key:
    """Evaluates a site's key at chosen positions from one draw of what its projections yield."""

    def __init__(self, captured: Captured, site: Site, active: frozenset[Node]):
        self.captured, self.site = captured, site
        self.made = projections(captured, site.k, active)
        self.slice = backward_slice([site.k], self.made)
        inside = [node for node in self.slice if node in active and node not in self.made]
        self.placed = [  # what the positions come in by: cosines and sines, usually
            arg
            for arg in dict.fromkeys(arg for node in inside for arg in node.all_input_nodes)
            if arg not in active and any(_is_position(captured, part) for part in backward_slice([arg]))
        ]
        self.sources = self._unturned(inside, active) or self.made

    def _unturned(self, inside: list[Node], active: frozenset[Node]) -> list[Node]:
        """The one node that is turned, if it is one; between it and the projections a norm may lose a dimension."""
        turned: set[Node] = set()
        for node in inside:
            if any(arg in turned or arg in self.placed for arg in node.all_input_nodes):
                turned.add(node)
        read = {arg for node in turned for arg in node.all_input_nodes if arg in active and arg not in turned}
        for node in common_ancestors(self.captured, read, active):
            between = backward_slice([self.site.k], [node])
            if node not in inside or any(made in between for made in self.made):
                return []  # several tensors are turned, or joined to what is turned: draw each of them
            if isinstance(node.meta.get("val"), Tensor):
                return [node]
        return []

    def at(self, positions: list[int], batch: int) -> Tensor:
        """[S, B*Hkv, D] fp64 keys: the same un-rotated ones at each of ``positions``."""
        sizes = Sizes(batch=batch, length=len(positions))
        feeds = self._feeds(positions, sizes)
        feeds |= {node: self._draw(node, sizes) for node in self.sources}
        value = evaluate(self.captured, self.site.k, feeds, sizes, _exactly_at(positions))
        return to_canonical(self.site.layouts.k, value, batch).double().permute(2, 0, 1, 3).flatten(1, 2)

    def gain(self) -> float:
        """Largest cosine at position 0."""
        sizes = Sizes(batch=1, length=1)
        found = [
            evaluate(self.captured, node, self._feeds([0], sizes), sizes, _exactly_at([0])) for node in self.placed
        ]
        return max((float(value.abs().max()) for value in found if _is_real(value)), default=1.0)

    def _feeds(self, positions: list[int], sizes: Sizes) -> dict[Node, Tensor]:
        feeds: dict[Node, Tensor] = {}
        for node in self.slice:
            if node.op == "get_attr":
                value = attribute(self.captured, node)
                feeds[node] = value.detach().double() if value.is_floating_point() else value
        device = next((value.device for value in feeds.values()), None)
        row = torch.tensor(positions, device=device).expand(sizes.batch, -1).contiguous()
        given = {"position_ids": row, "attention_mask": torch.ones_like(row)}
        return feeds | {
            node: value for name, value in given.items() if (node := self.captured.placeholder(name)) is not None
        }

    def _draw(self, node: Node, sizes: Sizes) -> Tensor:
        """Random activations that repeat over the sequence."""
        value = node.meta["val"]
        one, all_ = (
            [concrete(size, substitution(self.captured, sample)) for size in value.shape]
            for sample in (Sizes(sizes.batch, 1), sizes)
        )
        dtype = torch.complex128 if value.is_complex() else torch.float64
        drawn = torch.randn(one, dtype=dtype, generator=torch.Generator().manual_seed(len(node.name)))
        for axis, (short, long) in enumerate(zip(one, all_, strict=True)):
            drawn = drawn.repeat_interleave(long // short, axis)
        return drawn.to(value.device)


def _read(key: _Key) -> Frame | None:
    """The frame; None when the keys are the same at every position."""
    farthest = _farthest(key)
    heads, dim = key.site.kv_heads, key.site.key_dim
    places = sorted({0, 1, min(29, farthest), max(1, farthest // 9), farthest})
    keys = key.at(places, batch=2 * dim // heads + 2)
    if bool((keys == keys[:1]).all()):
        return None
    first, second = _pairs(_maps(keys))
    powers = [1 << step for step in range(farthest.bit_length())]
    frame = Frame(first, second, _frequencies(key.at([0, *powers], batch=2), first, second), key.gain())
    _check(key, frame, farthest)
    return frame


def _farthest(key: _Key) -> int:
    reach = FARTHEST
    while reach > 1:
        try:
            key.at([0, reach], batch=1)
            return reach
        except Unevaluable as failure:
            if failure.node.op != "call_function":
                raise
            reach //= 2
    return 1


def _maps(keys: Tensor) -> Tensor:
    """[S - 1, D, D] maps from the key at position 0 to the key at every other position."""
    start = keys[:1].expand(len(keys) - 1, -1, -1)
    found = torch.linalg.lstsq(start, keys[1:]).solution
    if float((start @ found - keys[1:]).abs().max()) > EXACT * float(keys.abs().max()):
        raise Unturnable("the key is no linear function of the key at position 0")
    eye = torch.eye(found.shape[-1], dtype=found.dtype, device=found.device)
    if float((found.transpose(1, 2) @ found - eye).abs().max()) > 10 * EXACT:
        raise Unturnable("from position to position it changes by more than a rotation")
    return found.transpose(1, 2)


def _pairs(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Channels that turn into each other, the lower one first."""
    share = maps.abs().amax(0).fill_diagonal_(0)
    coupled = (share > COUPLED) | (share.T > COUPLED)
    if int(coupled.sum(-1).max()) != 1:
        raise Unturnable("its channels do not turn in pairs")
    partner = coupled.int().argmax(-1)
    first = (coupled.any(-1) & (torch.arange(len(partner), device=partner.device) < partner)).nonzero().flatten()
    return first.cpu(), partner[first].cpu()


def _frequencies(keys: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """[P] fp64 radians per position from keys at 0, 1, 2, 4, ...: each doubling halves what rounding leaves."""
    pairs = torch.complex(keys[..., first.to(keys.device)], keys[..., second.to(keys.device)])
    angles = (pairs[1:] * pairs[:1].conj()).sum(1).angle().cpu()
    freq = angles[0]
    for step, angle in enumerate(angles[1:], start=1):
        off = torch.remainder(angle - freq * 2**step + torch.pi, 2 * torch.pi) - torch.pi
        freq = freq + off / 2**step
    return freq


def _check(key: _Key, frame: Frame, farthest: int) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, farthest + 1, (12,), generator=generator).tolist()
    positions = [0, *(place for place in (2, 3, 100, 5000, 30000, *drawn) if place <= farthest)]
    keys = key.at(positions, batch=4).transpose(0, 1)
    start = keys[:, :1].expand_as(keys)
    by = torch.tensor(positions)
    allowed = float(start.abs().max()) * (EXACT + DRIFT * by).unsqueeze(-1).to(keys.device)
    for found, expected in ((frame.turn(start, by), keys), (frame.turn(keys, -by), start)):
        if not bool(((found - expected).abs() <= allowed).all()):
            raise Unturnable("the angle is not proportional to the position")


def _is_position(captured: Captured, node: Node) -> bool:
    """Whether positions start here: the input, or numbers counted over the sequence."""
    if node.op == "placeholder":
        return node.target in ("position_ids", "attention_mask")
    return node.target is aten.arange.default and _over_length(captured, node)


def _over_length(captured: Captured, node: Node) -> bool:
    size = node.meta["val"].shape[0]
    return isinstance(size, torch.SymInt) and captured.symbols.get(size.node.expr) == "length"


def _is_real(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and value.numel() > 0


def _exactly_at(positions: list[int]):
    """Run in fp64, and let every count over the sequence yield ``positions``."""
    wide = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64}

    def override(node: Node, args: tuple, kwargs: dict):
        kwargs = (
            {**kwargs, "dtype": wide.get(kwargs.get("dtype"), kwargs.get("dtype"))} if "dtype" in kwargs else kwargs
        )
        shape = getattr(node.meta.get("val"), "shape", ())
        try:
            if node.target is aten.arange.default and len(args) == 1 and isinstance(shape[0], torch.SymInt):
                return torch.tensor(positions).to(dtype=kwargs.get("dtype"), device=kwargs.get("device"))
            return node.target(*args, **kwargs)
        except Exception as error:
            raise Unevaluable(node, str(error).splitlines()[0]) from error

    return override
