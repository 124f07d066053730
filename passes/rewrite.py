"""Replace every site by ``kvpass::attend``. The only pass that changes what the graph computes with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from kvpass.kernels.attend import attend
from kvpass.passes.evaluate import attribute
from kvpass.passes.layouts import CANONICAL, insert_canonical, insert_layout
from kvpass.passes.spec import CONSTANT, LayerSpec, Plan, Program, Site

aten = torch.ops.aten
STATE = ("store_k", "store_v", "log_votes", "row_start", "row_len", "tail_k", "tail_v")


def state_name(layer: int, field: str) -> str:
    """Graph input of one field of one layer's cache."""
    return f"kv{layer}_{field}"


def tail_name(window: int, field: str) -> str:
    """Graph input shared by all layers of one window: ``tail_pos`` or ``tail_at``."""
    return f"{field}_{window or 'full'}"


def rewrite(plan: Plan) -> Program:
    """A new graph over the same weights in which each site owns its keys and values; the captured one is untouched."""
    graph = Graph()
    mapping: dict[Node, Node] = {}
    graph.output(graph.graph_copy(plan.captured.graph, mapping)[0])
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]

    def placeholder(name: str) -> Node:
        nonlocal last
        with graph.inserting_after(last):
            last = graph.placeholder(name)
        return last

    q_pos = placeholder("q_pos")
    tails = {
        window: (placeholder(tail_name(window, "tail_pos")), placeholder(tail_name(window, "tail_at")))
        for window in plan.windows
    }
    states: dict[tuple, list[Node]] = {}
    layers = []
    for site in plan.sites:
        if (site.k, site.v) not in states:
            states[site.k, site.v] = [placeholder(state_name(len(states), field)) for field in STATE]
            layers.append(_layer(site, mapping))
    # Of the sites that share a cache the last appends: the others must not find the new tokens among the old ones.
    writers = {(site.k, site.v): site for site in plan.sites}
    constants = {}
    for index, site in enumerate(plan.sites):
        slopes = None
        if site.slopes:
            name = f"{CONSTANT}slopes_{index}"
            constants[name] = torch.tensor(site.slopes, dtype=torch.float32) / site.logits.scale
            slopes = name
        writes = writers[site.k, site.v] is site
        _replace(graph, mapping, site, q_pos, states[site.k, site.v], tails[site.mask.window], writes, slopes)
    graph.lint()
    weights = {str(node.target): node for node in graph.nodes if node.op == "get_attr"}
    device = next(plan.captured.module.parameters()).device
    found = {
        name: constants[name].to(device) if name in constants else attribute(plan.captured, node)
        for name, node in weights.items()
    }
    return Program(GraphModule(found, graph), tuple(layers))


def _replace(
    graph: Graph,
    mapping: dict[Node, Node],
    site: Site,
    q_pos: Node,
    state: list[Node],
    tail: tuple[Node, Node],
    writes: bool,
    slopes: str | None,
) -> None:
    output = mapping[site.output]
    sinks = site.logits.sinks
    with graph.inserting_before(output):
        q, k, v = _operands(graph, mapping, site)
        if slopes is not None:
            q, k = _with_positions(graph, site, q, k, q_pos, graph.get_attr(slopes))
        node = attended = graph.call_function(
            attend,
            (
                q,
                k,
                v,
                q_pos,
                *state,
                *tail,
                site.logits.scale,
                site.mask.window,
                site.logits.softcap,
                None if sinks is None else _per_head(graph, mapping[sinks]),
                site.mask.chunk,
                writes,
            ),
        )
        if site.layouts.output != CANONICAL:
            sizes = {"s": _size(graph, 1), "h": site.heads, "d": site.value_dim}
            if "n" not in site.layouts.output:
                sizes |= {"b": _size(graph, 0), **_grouped(site)}
            node = insert_layout(graph, attended, site.layouts.output, sizes)
    attended.meta = {key: value for key, value in output.meta.items() if key != "val" or node is attended}
    node.meta = dict(output.meta)
    for user in output.users:
        if user.target is aten.view.default:
            user.target = aten.reshape.default  # the operator's memory is [B, S, H, D], which may not be viewed alike
    output.replace_all_uses_with(node)
    graph.erase_node(output)


def _operands(graph: Graph, mapping: dict, site: Site) -> Iterator[Node]:
    """Query, key and value as [B, H, S, D]."""
    heads = (site.heads, site.kv_heads, site.kv_heads)
    dims = (site.key_dim, site.key_dim, site.value_dim)
    layouts = (site.layouts.q, site.layouts.k, site.layouts.v)
    for operand, layout, head, dim in zip((site.q, site.k, site.v), layouts, heads, dims, strict=True):
        sizes: dict[str, Node | int] = {"h": head, "d": dim}
        if layout != CANONICAL and len(layout) != 4:
            sizes |= {"b": _size(graph, 0), "s": _size(graph, 1)}
        yield insert_canonical(graph, mapping[operand], layout, sizes)


def _with_positions(graph: Graph, site: Site, q: Node, k: Node, q_pos: Node, slopes: Node) -> tuple[Node, Node]:
    """Query and key with one more channel, whose product is the bias: slope over scale, and the key's position."""
    at = graph.call_function(aten._to_copy.default, (q_pos,), {"dtype": site.k.meta["val"].dtype})
    for axis in (1, 3):
        at = graph.call_function(aten.unsqueeze.default, (at, axis))
    at = graph.call_function(aten.expand.default, (at, [-1, site.kv_heads, -1, -1]))
    slopes = graph.call_function(aten.view.default, (slopes, [1, site.heads, 1, 1]))
    slopes = graph.call_function(aten._to_copy.default, (slopes,), {"dtype": site.q.meta["val"].dtype})
    slopes = graph.call_function(aten.expand.default, (slopes, [_size(graph, 0), -1, _size(graph, 1), -1]))
    return tuple(graph.call_function(aten.cat.default, ([x, extra], -1)) for x, extra in ((q, slopes), (k, at)))


def _grouped(site: Site) -> dict[str, int]:
    """Sizes of the two head dimensions of an output that has both."""
    if "g" not in site.layouts.output:
        return {"h": site.heads}
    kv_heads = int(site.output.meta["val"].shape[site.layouts.output.index("h")])
    return {"h": kv_heads, "g": site.heads // kv_heads}


def _size(graph: Graph, axis: int) -> Node:
    """Batch or length, taken from the token ids."""
    ids = next(node for node in graph.nodes if node.target == "input_ids")
    return graph.call_function(aten.sym_size.int, (ids, axis))


def _per_head(graph: Graph, sinks: Node) -> Node:
    """[Hq] fp32 of the sink column [B, Hq, S, 1]."""
    for axis in (3, 2, 0):
        sinks = graph.call_function(aten.select.int, (sinks, axis, 0))
    sinks = graph.call_function(aten._to_copy.default, (sinks,), {"dtype": torch.float32})
    return graph.call_function(aten.clone.default, (sinks,), {"memory_format": torch.contiguous_format})


def _layer(site: Site, mapping: dict[Node, Node]) -> LayerSpec:
    return LayerSpec(
        layer=site.layer,
        heads=site.heads,
        kv_heads=site.kv_heads,
        key_dim=site.key_dim + bool(site.slopes),
        value_dim=site.value_dim,
        scale=site.logits.scale,
        window=site.mask.window,
        chunk=site.mask.chunk,
        position_channels=int(bool(site.slopes)),
        turns=site.turns,
        frame=site.frame,
        out=site.out,
        hidden=None if site.hidden is None else mapping[site.hidden].name,
    )
