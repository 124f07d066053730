"""From the step program to code for one token and a fixed batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
import torch._inductor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.node import map_arg
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from kvpass.kernels.attend import attend, implementation
from kvpass.passes.evaluate import attribute
from kvpass.passes.regions import Region, cut, is_state
from kvpass.passes.skinny import use_skinny_linears
from kvpass.passes.spec import Program
from kvpass.passes.specialize import specialize
from kvpass.progress import bar

# Pointwise kernels of one token are shorter than waking a thread; sizes were checked when the cache was built.
INDUCTOR_OPTIONS = {"cpp.threads": 1, "size_asserts": False}
# Sizes of the sample state: primes, all different, so that no two dimensions are taken for one.
_STORE, _TAIL, _ROW = 1013, 211, 7


@dataclass(frozen=True)
class _Call:
    run: Callable
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Lowered:
    """Compiled regions called in order. Values live in one list; a call names its slots."""

    constants: tuple  # slot -> weight, or None where a value goes
    arguments: tuple[int, ...]  # slots of the program's inputs
    calls: tuple[_Call, ...]
    result: int | tuple[int, ...]

    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        values = list(self.constants)
        for slot, value in zip(self.arguments, inputs, strict=True):
            values[slot] = value
        for call in self.calls:
            for slot, value in zip(call.outputs, call.run(*[values[slot] for slot in call.inputs]), strict=True):
                values[slot] = value
        if isinstance(self.result, int):
            return values[self.result]
        return tuple(values[slot] for slot in self.result)


@dataclass(frozen=True)
class Lowering:
    """The step program for one token, lowered on first use for each batch size."""

    program: Program
    backend: Callable[[Program, int, torch.dtype], Callable]
    dtype: torch.dtype  # of stored keys and values
    done: dict[int, Callable]

    def __call__(self, batch: int) -> Callable:
        if batch not in self.done:
            self.done[batch] = self.backend(self.program, batch, self.dtype)
        return self.done[batch]


def eager(program: Program, batch: int, dtype: torch.dtype) -> Callable:
    """The graph as it is."""
    return program.module


def inductor(program: Program, batch: int, dtype: torch.dtype) -> Callable:
    """Inductor code for one token and ``batch`` sequences.

    Rows and tails may have any length without recompiling. Layers that are the same function are compiled once.
    """
    program = use_skinny_linears(specialize(program, batch), rows=batch)
    regions = cut(program)
    sample = _Sampler(program, batch, dtype)
    slots: dict[Node, int] = {}
    for node in program.module.graph.nodes:
        slots[node] = len(slots)
    compiled: dict = {}
    calls = []
    for region in bar(regions, f"kvpass: lowering {len(regions)} regions for batch {batch}"):
        examples = [sample.values[node] for node in region.inputs]
        key = region.key(examples)
        if key not in compiled:
            compiled[key] = (_compile if region.attention is None else _attention)(region, examples)
        calls.append(
            _Call(compiled[key], tuple(slots[n] for n in region.inputs), tuple(slots[n] for n in region.outputs))
        )
    return Lowered(
        constants=tuple(attribute(program, node) if node.op == "get_attr" else None for node in slots),
        arguments=tuple(slots[node] for node in slots if node.op == "placeholder"),
        calls=tuple(calls),
        result=map_arg(next(node for node in slots if node.op == "output").args[0], slots.__getitem__),
    )


@torch.no_grad()
def _compile(region: Region, examples: Sequence[Tensor]) -> Callable:
    """Inductor's code for a region, without Dynamo's wrapper around every call: the module is frozen and ours, its
    sizes are fixed or declared dynamic here, so there is nothing to guard."""
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
    inputs = [_fake(mode, value, is_state(node)) for node, value in zip(region.inputs, examples, strict=True)]
    module = GraphModule(region.module, region.module.graph)
    with mode:
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)
    for node in module.graph.nodes:
        if node.op != "output":
            node.meta["example_value"] = node.meta["val"]
    return torch._inductor.standalone_compile(module, inputs, options={"config_patches": INDUCTOR_OPTIONS})


@torch.no_grad()
def _attention(region: Region, examples: Sequence[Tensor]) -> Callable:
    """The attention's implementation without the dispatcher and its checks, which hold for every step alike."""
    node = region.attention
    places = {placeholder: place for place, placeholder in enumerate(region.module.graph.find_nodes(op="placeholder"))}
    bound = node.args
    constants = tuple(value for value in bound if not isinstance(value, Node))
    order = iter(range(len(places), len(places) + len(constants)))
    pick = itemgetter(*(places[value] if isinstance(value, Node) else next(order) for value in bound))
    # Elsewhere the dispatcher chooses.
    ours = examples[0].device.type in ("cpu", "cuda")
    run = implementation(*pick((*examples, *constants))) if ours else attend
    return lambda *inputs: (run(*pick(inputs + constants)),)


def _fake(mode: FakeTensorMode, value: Tensor, is_state: bool) -> Tensor:
    kinds = [DimDynamic.DYNAMIC if is_state and size in (_STORE, _TAIL) else DimDynamic.STATIC for size in value.shape]
    return mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))


class _Sampler(Interpreter):
    """One step on made-up state, for an example of every value."""

    def __init__(self, program: Program, batch: int, dtype: torch.dtype):
        super().__init__(program.module, garbage_collect_values=False)
        self.values: dict[Node, Tensor] = {}
        with torch.no_grad():
            self.run(*_sample_inputs(program, batch, dtype))

    def run_node(self, node: Node):
        self.values[node] = super().run_node(node)
        return self.values[node]


def _sample_inputs(program: Program, batch: int, dtype: torch.dtype) -> list[Tensor]:
    device = next(program.module.parameters()).device
    step = torch.full((batch, 1), _ROW + 1, dtype=torch.int64, device=device)
    plain = {
        "input_ids": torch.ones_like(step),
        "position_ids": step,
        "keep": torch.zeros(1, dtype=torch.int64, device=device),
        "q_pos": step.to(torch.int32),
    }
    found = []
    for name in program.inputs:
        if name in plain:
            found.append(plain[name])
        elif name.startswith("tail_pos"):
            found.append(torch.full((batch, _TAIL), -1, dtype=torch.int32, device=device))
        elif name.startswith("tail_at"):
            found.append(torch.zeros(1, dtype=torch.int64, device=device))
        else:
            found.append(_sample_state(program, name, batch, dtype, device))
    return found


def _sample_state(program: Program, name: str, batch: int, dtype, device) -> Tensor:
    index, field = name.removeprefix("kv").split("_", 1)
    layer = program.layers[int(index)]
    heads = (batch, layer.kv_heads)
    make: dict[str, Callable[[], Tensor]] = {
        "store_k": lambda: torch.zeros(_STORE, layer.key_dim, dtype=dtype, device=device),
        "store_v": lambda: torch.zeros(_STORE, layer.value_dim, dtype=dtype, device=device),
        "log_votes": lambda: torch.zeros(_STORE, device=device),
        "row_start": lambda: torch.zeros(heads, dtype=torch.int64, device=device),
        "row_len": lambda: torch.full(heads, _ROW, dtype=torch.int32, device=device),
        "tail_k": lambda: torch.zeros(*heads, _TAIL, layer.key_dim, dtype=dtype, device=device),
        "tail_v": lambda: torch.zeros(*heads, _TAIL, layer.value_dim, dtype=dtype, device=device),
    }
    return make[field]()


BACKENDS: dict[str, Callable[[Program, int, torch.dtype], Callable]] = {"inductor": inductor, "eager": eager}
