"""Where a model's configuration says something else than its graph. The graph decides; the difference is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from kvpass.passes.spec import Site
from kvpass.report import Report


def crosschecked(report: Report, model: nn.Module, sites: Sequence[Site]) -> Report:
    """``report`` with a note on every layer whose heads or window are not what the configuration says."""
    config = getattr(model, "config", None)
    if config is None:
        return report
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    notes = {site.layer: list(_differences(text, index, site)) for index, site in enumerate(sites)}
    return Report(
        tuple(replace(row, note="; ".join(filter(None, [row.note, *notes.get(row.layer, [])]))) for row in report.rows)
    )


def _differences(config, index: int, site: Site) -> Iterator[str]:
    for what, expected, found in (
        ("query heads", getattr(config, "num_attention_heads", None), site.heads),
        ("KV heads", getattr(config, "num_key_value_heads", None), site.kv_heads),
        ("window", _window(config, index), site.mask.window if site.mask else None),
    ):
        if isinstance(expected, int) and found is not None and expected != found:
            yield f"{what}: {expected} by the configuration"


def _window(config, index: int) -> int | None:
    """The window that the configuration gives the layer; None where it does not say layer by layer."""
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if not isinstance(kinds, (list, tuple)) or index >= len(kinds) or not isinstance(window, int):
        return None
    return {"sliding_attention": window, "full_attention": 0}.get(kinds[index])
