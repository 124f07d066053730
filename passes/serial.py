"""A program as JSON and back, so that a second start needs no tracing. Data only: nothing is unpickled or evaluated."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from kvpass.kernels.frame import Frame
from kvpass.passes.evaluate import attribute
from kvpass.passes.spec import CONSTANT, LayerSpec, Program, Projection

NAMESPACES = ("aten", "kvpass", "prims")
_SIZES = "add sub mul floordiv truediv mod neg pow eq ne lt le gt ge getitem"
SIZE_OPERATORS = {f"operator.{name}": getattr(operator, name) for name in _SIZES.split()}
_NAMES = {function: name for name, function in SIZE_OPERATORS.items()}
_TORCH_KINDS = {"dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout}


class NotSerializable(Exception):
    """The program has something that JSON cannot hold, or the JSON is not a program."""


def to_data(program: Program) -> dict:
    """JSON-ready nodes and layers of ``program``; weights are named, not stored.

    Raises:
        NotSerializable: an operator or argument has no data form.
    """
    index: dict[Node, int] = {}
    nodes = []
    for node in program.module.graph.nodes:
        index[node] = len(index)
        nodes.append(
            {
                "op": node.op,
                "name": node.name,
                "target": _target_name(node),
                "args": _encode(node.args, index),
                "kwargs": {key: _encode(value, index) for key, value in node.kwargs.items()},
            }
            | _constant(program, node)
        )
    return {"nodes": nodes, "layers": [_layer_data(layer) for layer in program.layers]}


def from_data(data: dict, lookup: Callable[[str], Tensor]) -> Program:
    """The program of :func:`to_data` over the tensors that ``lookup`` finds by name.

    Raises:
        NotSerializable: the data is not a program, or names an operator or weight that does not exist here.
    """
    graph, made, root = Graph(), [], nn.Module()
    try:
        for item in data["nodes"]:
            target = _target(item["op"], item["target"])
            if item["op"] == "get_attr":
                own = target.startswith(CONSTANT)
                _attach(root, target, torch.tensor(item["value"]) if own else lookup(target))
            args = _decode(item["args"], made)
            kwargs = {key: _decode(value, made) for key, value in item["kwargs"].items()}
            made.append(graph.create_node(item["op"], target, args, kwargs, item["name"]))
        layers = tuple(_layer(layer) for layer in data["layers"])
        graph.lint()
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise NotSerializable(f"not a stored program: {error}") from error
    return Program(GraphModule(root, graph), layers)


def _constant(program: Program, node: Node) -> dict:
    """The numbers of a tensor that the rewriting made; a weight is only named."""
    if node.op != "get_attr" or not str(node.target).startswith(CONSTANT):
        return {}
    return {"value": attribute(program, node).tolist()}


def _layer_data(layer: LayerSpec) -> dict:
    data = dict(vars(layer))
    if layer.frame is not None:
        data["frame"] = {
            name: value.tolist() if isinstance(value, Tensor) else value for name, value in vars(layer.frame).items()
        }
    if layer.out is not None:
        data["out"] = dict(vars(layer.out))
    return data


def _layer(data: dict) -> LayerSpec:
    frame, out = data["frame"], data["out"]
    if frame is not None:
        first, second = (torch.tensor(frame[name], dtype=torch.int64) for name in ("first", "second"))
        frame = Frame(first, second, torch.tensor(frame["freq"], dtype=torch.float64), frame["gain"])
    return LayerSpec(**{**data, "frame": frame, "out": None if out is None else Projection(**out)})


def _target_name(node: Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in NAMESPACES:
        return str(node.target)
    if node.target in _NAMES:
        return _NAMES[node.target]
    raise NotSerializable(f"{node.name} calls {node.target}")


def _target(op: str, name: str) -> Any:
    if op in ("placeholder", "get_attr", "output"):
        return name
    if op != "call_function":
        raise NotSerializable(f"unexpected {op}")
    if name in SIZE_OPERATORS:
        return SIZE_OPERATORS[name]
    namespace, operation, overload = name.split(".")
    if namespace not in NAMESPACES:
        raise NotSerializable(f"unexpected operator {name}")
    return getattr(getattr(getattr(torch.ops, namespace), operation), overload)


def _attach(root: nn.Module, name: str, tensor: Tensor) -> None:
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(leaf, tensor)
    else:
        root.register_buffer(leaf, tensor, persistent=False)


def _encode(value: Any, index: dict[Node, int]) -> Any:
    if isinstance(value, Node):
        return {"node": index[value]}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [_encode(item, index) for item in value]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, type_ in _TORCH_KINDS.items():
        if isinstance(value, type_):
            return {kind: str(value).removeprefix("torch.")}
    raise NotSerializable(f"an argument of type {type(value).__name__}")


def _decode(value: Any, made: list[Node]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    decoders: dict[str, Callable[[], Any]] = {
        "node": lambda: made[inner],
        "float": lambda: float(inner),
        "list": lambda: [_decode(item, made) for item in inner],
        "tuple": lambda: tuple(_decode(item, made) for item in inner),
        "device": lambda: torch.device(inner),
        **dict.fromkeys(_TORCH_KINDS, lambda: _torch_value(kind, inner)),
    }
    return decoders[kind]()


def _torch_value(kind: str, name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, _TORCH_KINDS[kind]):
        raise NotSerializable(f"torch.{name} is no {kind}")
    return value
