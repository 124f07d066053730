"""Replace every site by ``kvpass::attend``. The only pass that changes what the graph computes with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from kvpass.kernels.attend import attend
from kvpass.passes.layouts import CANONICAL, insert_canonical, insert_layout
from kvpass.passes.spec import LayerSpec, Plan, Program, Site

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
    for index, site in enumerate(plan.sites):
        state = [placeholder(state_name(index, field)) for field in STATE]
        _replace(graph, mapping, site, q_pos, state, tails[site.mask.window])
    graph.lint()
    return Program(GraphModule(plan.captured.module, graph), tuple(_layer(site) for site in plan.sites))


def _replace(graph: Graph, mapping: dict, site: Site, q_pos: Node, state: list[Node], tail: tuple) -> None:
    output = mapping[site.output]
    sinks = site.logits.sinks
    with graph.inserting_before(output):
        q, k, v = _operands(graph, mapping, site)
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
            ),
        )
        if site.layouts.output != CANONICAL:
            sizes = {"s": _size(graph, 1), "h": site.heads, "d": site.value_dim}
            if "n" not in site.layouts.output:
                sizes |= {"b": _size(graph, 0), **_grouped(site)}
            node = insert_layout(graph, attended, site.layouts.output, sizes)
    attended.meta = {key: value for key, value in output.meta.items() if key != "val" or node is attended}
    node.meta = dict(output.meta)
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


def _layer(site: Site) -> LayerSpec:
    return LayerSpec(
        layer=site.layer,
        heads=site.heads,
        kv_heads=site.kv_heads,
        key_dim=site.key_dim,
        value_dim=site.value_dim,
        scale=site.logits.scale,
        window=site.mask.window,
    )
