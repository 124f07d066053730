"""Locate attention by what is computed: every SDPA, and every softmax over the sequence, read in both directions."""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Node

from kvpass.passes import places
from kvpass.passes.contract import check_views, read_output, read_scores
from kvpass.passes.evaluate import Unevaluable, evaluate
from kvpass.passes.heads import SAMPLE, sample_shape, shared_sources, sources
from kvpass.passes.layouts import CANONICAL, heads_of, layouts_of
from kvpass.passes.readers import VIEWS, Unreadable, read, settled
from kvpass.passes.spec import Captured, Ignored, Layouts, Logits, MaskTerm, Plan, Refusal, Site, Sizes

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
CONTRACTIONS = (aten.matmul.default, aten.bmm.default, aten.einsum.default)
SOFTMAXES = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)


def find(captured: Captured) -> Plan:
    """Sites, refusals and softmaxes that are not attention, in graph order. The graph is not changed."""
    sites, refusals, ignored = [], [], []
    for node in captured.graph.nodes:
        if node.op != "call_function":
            continue
        try:
            if node.target is SDPA:
                sites.append(_sdpa_site(captured, node))
            elif node.target in SOFTMAXES:
                if _over_sequence(captured, node):
                    sites.append(_softmax_site(captured, node))
                else:
                    ignored.append(
                        Ignored(places.layer(node), node.name, "softmax over a fixed size, not the sequence")
                    )
        except Unreadable as failure:
            refusals.append(refusal(node, failure))
    if not sites and not refusals:
        refusals.append(Refusal("no attention over the sequence was found", hint="only decoders are supported"))
    return Plan(captured, tuple(sites), tuple(refusals), tuple(ignored))


def refusal(anchor: Node, failure: Unreadable) -> Refusal:
    """The failure with the layer of its attention and the source line of the step that was not understood."""
    return Refusal(
        reason=failure.reason,
        layer=places.layer(anchor),
        node=failure.node.name,
        source=places.source(failure.node),
    )


def _over_sequence(captured: Captured, node: Node) -> bool:
    axis = node.args[1]
    size = node.meta["val"].shape[axis]
    symbols = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()
    return any(captured.symbols.get(symbol) == "length" for symbol in symbols)


def _sdpa_site(captured: Captured, node: Node) -> Site:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.get("dropout_p", 0.0):
        raise Unreadable(node, "applies dropout to the attention weights")
    scale = given.get("scale")
    if scale is None:
        scale = given["query"].meta["val"].shape[-1] ** -0.5
    if not isinstance(scale, (int, float)):
        raise Unreadable(node, "scales by a value that depends on data")
    query, key, value = (given[name] for name in ("query", "key", "value"))
    for operand in (query, key, value):
        if CANONICAL not in layouts_of(captured, operand):
            raise Unreadable(node, "an operand of the attention is not [B, H, S, D]")
    mask = given.get("attn_mask")
    logits = Logits(
        operands=(query, key),
        core=node,
        scale=float(scale),
        masks=() if mask is None else (MaskTerm(mask, at=node),),
        causal=bool(given.get("is_causal", False)),
        steps=("matmul", "scale") + (("mask",) if mask is not None else ()),
    )
    operands = ((query, CANONICAL), (key, CANONICAL), (value, CANONICAL))
    return _site(captured, node, node, logits, operands, CANONICAL)


def _softmax_site(captured: Captured, node: Node) -> Site:
    if node.args[1] not in (-1, node.meta["val"].ndim - 1):
        raise Unreadable(node, "softmax over a dimension that is not the last")
    logits = settled(read(node.args[0]), node.args[0])
    if logits.steps[-1:] == ("tanh",):
        raise Unreadable(node, "a tanh on the logits without the factor of a soft cap")
    query, key = read_scores(captured, logits)
    check_views(captured, logits)
    if logits.sinks is not None:
        _check_sinks(captured, logits.sinks)
    heads = heads_of(query[1], sample_shape(captured, query[0]), SAMPLE.batch)
    output = _consumer(node, logits)
    operands = output.args[1] if output.target is aten.einsum.default else output.args[:2]
    value, layout = read_output(captured, node, output, tuple(operands), heads)
    return _site(captured, node, output, logits, (query, key, value), layout)


def _check_sinks(captured: Captured, sinks: Node) -> None:
    """A sink is one constant per head: [B, Hq, S, 1], the same for every sequence and token."""
    try:
        value = evaluate(captured, sinks, {}, Sizes(batch=2, length=3))
    except Unevaluable as failure:
        raise Unreadable(sinks, f"the sink column {failure.reason}") from failure
    if value.ndim != 4 or value.shape[-1] != 1 or not bool((value == value[:1, :, :1]).all()):
        raise Unreadable(sinks, "the sink column is not one constant per head")


def _consumer(softmax: Node, logits: Logits) -> Node:
    """The contraction of the weights with the values; nothing else may use the weights."""
    node = softmax
    while True:
        users = list(node.users)
        if len(users) != 1:
            raise Unreadable(node, f"the attention weights have {len(users)} consumers")
        user = users[0]
        last = node.meta["val"].ndim - 1
        if user.target in (aten._to_copy.default, *VIEWS) or (
            logits.sinks is not None and user.target is aten.slice.Tensor and user.args[1:] in ((last, 0, -1),)
        ):
            node = user
        elif user.target in CONTRACTIONS:
            return user
        else:
            raise Unreadable(user, f"unread step {user.target} between softmax and values")


def _site(captured: Captured, anchor: Node, output: Node, logits: Logits, operands, layout: str) -> Site:
    query, key, value = operands
    heads = heads_of(query[1], sample_shape(captured, query[0]), SAMPLE.batch)
    found = shared_sources(captured, key, value, heads)
    if found is None:
        raise Unreadable(anchor, "keys and values are not [B, Hkv, S, D], each head repeated for its group of queries")
    keys, values = found
    own = (source for source in sources(captured, *query, heads) if source.layout == CANONICAL)
    plain = next((source for source in own if source.kv_heads == heads and source.grouped and source.factor == 1), None)
    if plain is not None:
        query = plain.node, CANONICAL
    return Site(
        layer=places.layer(anchor),
        anchor=anchor,
        output=output,
        q=query[0],
        k=keys.node,
        v=values.node,
        layouts=Layouts(query[1], keys.layout, values.layout, layout),
        heads=heads,
        kv_heads=keys.kv_heads,
        key_dim=keys.dim,
        value_dim=values.dim,
        logits=dataclasses.replace(logits, scale=logits.scale * keys.factor),
    )
