"""Make the prefill program end in a compression: gather what the policy wants to see, then call it.

The nodes stand in the graph, so printing it shows what is observed and where the cache is compressed.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from kvpass.kernels.attend import attend
from kvpass.passes.evaluate import attribute
from kvpass.passes.rewrite import STATE, state_name, tail_name
from kvpass.passes.spec import Program

aten = torch.ops.aten
_STORE = 4  # argument of ``attend`` that tells caches apart
METADATA = ("store_tokens", "store_pos")


def insert_hooks(program: Program, compress: nn.Module, taps: Collection[int] = ()) -> Program:
    """A copy of ``program`` that returns ``(logits, compress(...))``.

    ``compress`` is called with the observed queries (one [B, Hq, W, Dk] per layer), their columns [B, W] (-1 unused),
    q_pos [B, S], the tail positions and slots by window, every layer's state fields, what the caller passes as
    ``chunk``: whatever it needs to know about earlier and later pieces of the same prompt, and the input [B, S, E] of
    every layer's attention, None for layers that are not in ``taps`` or whose input was not found.
    """
    graph = Graph()
    mapping: dict[Node, Node] = {}
    logits = graph.graph_copy(program.module.graph, mapping)
    placeholders = {node.target: node for node in graph.nodes if node.op == "placeholder"}
    last = list(placeholders.values())[-1]
    for name in [
        "chunk",
        "observe_at",
        *(state_name(i, f) for i in range(len(program.layers)) for f in METADATA),
    ]:
        with graph.inserting_after(last):
            last = placeholders[name] = graph.placeholder(name)
    columns = placeholders["observe_at"]
    index = graph.call_function(aten.clamp.default, (columns, 0))
    index = graph.call_function(aten.unsqueeze.default, (index, 1))
    index = graph.call_function(aten.unsqueeze.default, (index, 3))
    queries = _queries(graph)
    observed = [_observe(graph, query, index, layer) for query, layer in zip(queries, program.layers, strict=True)]
    named = {node.name: mapping[node] for node in program.module.graph.nodes if node in mapping}
    hidden = [named.get(layer.hidden) if index in taps else None for index, layer in enumerate(program.layers)]
    windows = dict.fromkeys(layer.window for layer in program.layers)
    tails = [[placeholders[tail_name(window, field)] for field in ("tail_pos", "tail_at")] for window in windows]
    state = [[placeholders[state_name(i, field)] for field in (*STATE, *METADATA)] for i in range(len(program.layers))]
    result = graph.call_module(
        "compress", (observed, columns, placeholders["q_pos"], tails, state, placeholders["chunk"], hidden)
    )
    graph.output((logits, result))
    weights = {str(node.target): attribute(program, node) for node in graph.nodes if node.op == "get_attr"}
    module = GraphModule({**weights, "compress": compress}, graph)
    graph.lint()
    return Program(module, program.layers)


def return_queries(program: Program) -> Program:
    """A copy of ``program`` that returns ``(logits, query of layer 0, query of layer 1, ...)``, each [B, Hq, S, Dk].

    Compression while decoding judges entries by the queries of the last tokens.
    """
    graph = Graph()
    mapping: dict[Node, Node] = {}
    logits = graph.graph_copy(program.module.graph, mapping)
    graph.output((logits, *_queries(graph)))
    return Program(GraphModule(program.module, graph), program.layers)


def _queries(graph: Graph) -> list[Node]:
    """The query of each cache: of its first attention, where several read it."""
    sites = [node for node in graph.nodes if node.target is attend]
    return list({site.args[_STORE]: site.args[0] for site in reversed(sites)}.values())[::-1]


def _observe(graph: Graph, q: Node, index: Node, layer) -> Node:
    wide = graph.call_function(aten.expand.default, (index, [-1, layer.heads, -1, layer.key_dim]))
    return graph.call_function(aten.gather.default, (q, 2, wide))
