"""What compression may know of each site: how its keys turn, where its output goes, what its attention reads."""

from __future__ import annotations

import dataclasses

from kvpass.passes.outputs import find_projection
from kvpass.passes.rotary import read_turning
from kvpass.passes.sources import activations, attention_input
from kvpass.passes.spec import Plan, Site


def inputs(plan: Plan) -> Plan:
    """The plan with these facts on every site. Nothing here refuses a model, and the graph is not changed."""
    captured, active = plan.captured, activations(plan.captured)

    def known(site: Site) -> Site:
        turning = read_turning(captured, site, active)
        return dataclasses.replace(
            site,
            turns=turning.turns,
            frame=turning.frame,
            frame_note=turning.note,
            out=find_projection(captured, site),
            hidden=attention_input(captured, (site.q, site.k, site.v), active),
        )

    return dataclasses.replace(plan, sites=tuple(known(site) for site in plan.sites))
