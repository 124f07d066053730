"""Check that the sites together make a decoder that one cache per site can serve."""

from __future__ import annotations

import dataclasses

import torch

from kvpass.passes.spec import Plan, Refusal, Site


def plan(found: Plan) -> Plan:
    """The plan with refusals for what the cache layout cannot express. The graph is not changed."""
    refusals = list(found.refusals)
    owners: dict[tuple, Site] = {}
    for site in found.sites:
        owner = owners.setdefault((site.k, site.v), site)
        if site.mask != owner.mask or (bool(site.slopes or owner.slopes) and site is not owner):
            refusals.append(
                Refusal("shares keys and values with a layer that masks them differently", site.layer, site.k.name)
            )
        if site.slopes and site.k.meta["val"].dtype not in (torch.float32, torch.float64):
            refusals.append(
                Refusal("adds positions to the logits, which half precision cannot hold exactly", site.layer)
            )
    outputs = next(node for node in found.captured.graph.nodes if node.op == "output").args[0]
    if len(outputs) != 1:
        refusals.append(Refusal("returns more than logits"))
    return dataclasses.replace(found, refusals=tuple(refusals))
