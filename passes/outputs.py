"""The linear layer that an attention's output goes to: what each head's values become in the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from kvpass.passes.evaluate import KEEP, Unevaluable, concrete, evaluate, substitution
from kvpass.passes.layouts import from_canonical
from kvpass.passes.spec import Captured, Projection, Site, Sizes

aten = torch.ops.aten
# operator -> the arguments that are its input and its weight, and whether the weight is [in, out]
LINEARS = {
    aten.linear.default: (0, 1, False),
    aten.addmm.default: (1, 2, True),
    aten.mm.default: (0, 1, True),
    aten.matmul.default: (0, 1, True),
}
TURNED = {aten.t.default, aten.transpose.int, aten.permute.default}
_SAMPLE = Sizes(batch=2, length=3)


def find_projection(captured: Captured, site: Site) -> Projection | None:
    """The weight that the site's output, heads side by side, is multiplied with; None when it goes elsewhere."""
    consumer = _consumer(site.output)
    if consumer is None:
        return None
    place, weight_place, input_first = LINEARS[consumer.target]
    operand, weight = consumer.args[place], consumer.args[weight_place]
    while weight.op == "call_function" and weight.target in TURNED:
        weight, input_first = weight.args[0], not input_first
    if weight.op != "get_attr" or not _side_by_side(captured, site, operand):
        return None
    size = weight.meta["val"].shape[0 if input_first else 1]
    return Projection(str(weight.target), input_first) if size == site.heads * site.value_dim else None


def per_head(projection: Projection, weight: Tensor, heads: int) -> Tensor:
    """``weight`` as [Hq, Dv, E], a view."""
    weight = weight.detach() if projection.input_first else weight.detach().t()
    return weight.unflatten(0, (heads, -1))


def _consumer(node: Node) -> Node | None:
    """The linear operator behind steps that only move the output; whether they do is decided by evaluation."""
    while True:
        users = [user for user in node.users if isinstance(user.meta.get("val"), torch.Tensor)]
        if len(users) != 1:
            return None
        user = users[0]
        if user.target in LINEARS:
            place, weight_place, _ = LINEARS[user.target]
            return user if user.args[place] is node and user.args[weight_place] is not node else None
        if [arg for arg in user.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor)] != [node]:
            return None
        node = user


def _side_by_side(captured: Captured, site: Site, operand: Node) -> bool:
    """Whether the operand holds the output's heads next to each other, token by token, and nothing else."""
    value = site.output.meta["val"]
    sample = torch.randn(
        _SAMPLE.batch, site.heads, _SAMPLE.length, site.value_dim, generator=torch.Generator().manual_seed(0)
    )
    sample = sample.to(device=value.device, dtype=value.dtype)
    shape = [concrete(size, substitution(captured, _SAMPLE)) for size in value.shape]
    given = from_canonical(site.layouts.output, sample, tuple(shape))
    try:
        found = evaluate(captured, operand, {site.output: given}, _SAMPLE, _whatever_the_strides)
    except Unevaluable:
        return False
    wide = site.heads * site.value_dim
    if found.numel() != sample.numel() or found.shape[-1] != wide:
        return False
    return bool((found.reshape(-1, wide) == sample.transpose(1, 2).reshape(-1, wide)).all())


def _whatever_the_strides(node: Node, args: tuple, kwargs: dict):
    """The sample lies in memory unlike what an attention returns, which only a view notices."""
    return args[0].reshape(args[1]) if node.target is aten.view.default else KEEP
