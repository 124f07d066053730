"""Spell a freshly exported graph without operators that may alias or write in place, in the graph itself.

torch.export gives a graph of the operators that the model called. ``run_decompositions({})`` makes it functional by
tracing it a second time, which takes longer than the first. Nearly all models need only what this table rewrites; for
the others :func:`functional` leaves the graph alone and says so, and the second trace does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class _Unknown(Exception):
    """A node that only a second trace makes functional."""


def functional(graph: Graph) -> bool:
    """Whether ``graph`` is functional now. If it cannot be made so here, it is left as it was."""
    try:
        for node in graph.nodes:
            _check(node)
    except _Unknown:
        return False
    for node in list(graph.nodes):
        if node.op == "call_function" and (rewrite := _rewriter(node)):
            with graph.inserting_before(node):
                rewrite(node)
    graph.eliminate_dead_code()
    return True


def _check(node: Node) -> None:
    if node.op in ("call_module", "call_method"):
        raise _Unknown
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OperatorBase):
        return  # arithmetic on sizes, items of a tuple
    if not isinstance(node.target, torch._ops.OpOverload):
        raise _Unknown  # a nested graph
    if node.target in IN_TABLE:
        if not IN_TABLE[node.target][0](node):
            raise _Unknown
    elif node.target._schema.is_mutable:
        if not _writes_to_its_own(node):
            raise _Unknown
    elif may_alias(node.target) and node.target.has_kernel_for_dispatch_key(_COMPOSITE):
        raise _Unknown


def may_alias(operator: torch._ops.OpOverload) -> bool:
    """Whether a result may share memory with an argument."""
    unsure = getattr(torch.Tag, "maybe_aliasing_or_mutating", None) in operator.tags
    return unsure or any(argument.alias_info for argument in operator._schema.arguments)


def _rewriter(node: Node) -> Callable[[Node], None] | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target in IN_TABLE:
        return IN_TABLE[node.target][1]
    return _out_of_place if node.target._schema.is_mutable else None


def _become(node: Node, target, args: tuple, kwargs: dict | None = None) -> None:
    node.target, node.args, node.kwargs = target, args, kwargs or {}


def _vanish(node: Node) -> None:
    node.replace_all_uses_with(node.args[0])


# --- operators that return their argument or a copy -----------------------------------------------------------------


def _is_conversion(node: Node) -> bool:
    return not node.kwargs.get("memory_format") and all(a.kwarg_only or a.name in _CONVERTS for a in _given(node))


_CONVERTS = ("self", "dtype", "device", "non_blocking", "copy")


def _given(node: Node) -> list:
    return list(node.target._schema.arguments)[: len(node.args)]


def _convert(node: Node) -> None:
    before, after = node.args[0].meta["val"], node.meta["val"]
    given = dict(zip((a.name for a in _given(node)), node.args, strict=True)) | node.kwargs
    if (before.dtype, before.device) == (after.dtype, after.device) and not given.get("copy"):
        _vanish(node)
    else:
        wanted = {"dtype": (before.dtype, after.dtype), "device": (before.device, after.device)}
        changed = {name: new for name, (old, new) in wanted.items() if old != new}
        _become(node, aten._to_copy.default, node.args[:1], changed)


def _is_off(node: Node) -> bool:
    return node.args[1] == 0 or not node.args[2]


def _lay_out(node: Node) -> None:
    _become(node, aten.clone.default, node.args[:1], {"memory_format": torch.contiguous_format})


# --- operators that return views ------------------------------------------------------------------------------------


def _always(node: Node) -> bool:
    return True


def _leave(node: Node) -> None:
    pass


def _sizes(of: Node) -> list[Node | int]:
    shape = enumerate(of.meta["val"].shape)
    return [_size(of, axis, size) if isinstance(size, torch.SymInt) else size for axis, size in shape]


def _size(of: Node, axis: int, size) -> Node:
    node = of.graph.call_function(aten.sym_size.int, (of, axis))
    node.meta["val"] = size
    return node


def _flatten(node: Node) -> None:
    of, start, end = (*node.args, *(0, -1)[len(node.args) - 1 :])
    rank = of.meta["val"].ndim
    sizes = _sizes(of)
    _become(node, aten.reshape.default, (of, [*sizes[: start % rank], -1, *sizes[end % rank + 1 :]]))


def _expand_as(node: Node) -> None:
    _become(node, aten.expand.default, (node.args[0], _sizes(node.args[1])))


def _has_static_axis(node: Node) -> bool:
    of, _, axis = (*node.args, 0)[:3]
    return isinstance(of.meta["val"].shape[axis], int)


def _chunk(node: Node) -> None:
    of, chunks, axis = (*node.args, 0)[:3]
    _become(node, aten.split.Tensor, (of, max(1, math.ceil(of.meta["val"].shape[axis] / chunks)), axis))


# operator -> (can this node be rewritten, rewrite it)
IN_TABLE: dict[object, tuple[Callable[[Node], bool], Callable[[Node], None]]] = {
    aten.to.dtype: (_is_conversion, _convert),
    aten.to.device: (_is_conversion, _convert),
    aten.to.dtype_layout: (_is_conversion, _convert),
    aten.dropout.default: (_is_off, _vanish),
    aten.contiguous.default: (_always, _lay_out),
    aten.detach_.default: (_always, _vanish),
    aten.reshape.default: (_always, _leave),
    aten.flatten.using_ints: (_always, _flatten),
    aten.expand_as.default: (_always, _expand_as),
    aten.chunk.default: (_has_static_axis, _chunk),
}


# --- operators that write to their first argument -------------------------------------------------------------------


def _writes_to_its_own(node: Node) -> bool:
    """Whether what ``node`` writes to was computed for it: nobody else holds that memory, so a new tensor will do."""
    written, pure = node.args[0], _pure(node.target)
    if pure is None or not _is_fresh(written) or any(_shares(user) for user in written.users if user is not node):
        return False
    kept = written.meta["val"].dtype
    others = [a.meta["val"] for a in node.all_input_nodes if a is not written and "val" in a.meta]
    tensors = [other for other in others if isinstance(other, torch.Tensor)]
    return all(t.dtype == kept or (kept.is_floating_point and not t.is_floating_point()) for t in tensors)


def _pure(operator: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """``div_.Tensor`` -> ``div.Tensor``."""
    namespace, _, name = operator._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None) if name.endswith("_") else None
    pure = getattr(packet, operator._overloadname, None)
    if pure is None or pure._schema.is_mutable:
        return None
    same = [a.name for a in pure._schema.arguments] == [a.name for a in operator._schema.arguments]
    return pure if same else None


def _is_fresh(node: Node) -> bool:
    if getattr(node.target, "__name__", "") == "getitem":
        node = node.args[0]
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target._schema.is_mutable or not may_alias(node.target)


def _shares(user: Node) -> bool:
    """Whether ``user`` may hand on its argument's memory. Who writes to it does, if somebody uses the result."""
    if not isinstance(user.target, torch._ops.OpOverload):
        return True
    return may_alias(user.target) and not (user.target._schema.is_mutable and not user.users)


def _out_of_place(node: Node) -> None:
    written = node.args[0]
    node.target = _pure(node.target)
    written.replace_all_uses_with(node, delete_user_cb=lambda user: node < user)
