"""Check that the sites together make a decoder that one cache per site can serve."""

from __future__ import annotations

import dataclasses
from collections import Counter

from kvpass.passes.spec import Plan, Refusal


def plan(found: Plan) -> Plan:
    """The plan with refusals for what the cache layout cannot express. The graph is not changed."""
    refusals = list(found.refusals)
    owners = Counter((site.k, site.v) for site in found.sites)
    for site in found.sites:
        if owners[site.k, site.v] > 1:
            refusals.append(Refusal("shares its keys and values with another layer", site.layer, site.k.name))
    outputs = next(node for node in found.captured.graph.nodes if node.op == "output").args[0]
    if len(outputs) != 1:
        refusals.append(Refusal("returns more than logits"))
    return dataclasses.replace(found, refusals=tuple(refusals))
