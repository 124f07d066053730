"""Build a tiny random decoder of the zoo."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvpass.models.zoo import PLAIN, SIZES, ZOO, Row

# A family without a row may ignore the common sizes; above this it is not built.
MOST_WEIGHTS = 5_000_000


def tiny(name: str, attn: str | None = None, **overrides):
    """Build the zoo's decoder `name`: eval mode, float32, CPU, the same weights on every call.

    attn is "sdpa" or "eager"; None takes the row's first. overrides are config keywords (`num_hidden_layers=1`,
    `sliding_window=4`); both the common names and the model's own spellings work.

    Raises ValueError for an unknown name or an attention that the family does not have, TypeError for a keyword the
    config does not have.
    """
    if name not in ZOO:
        raise ValueError(f"unknown tiny decoder {name!r}; known ones: {', '.join(ZOO)}")
    row = ZOO[name]
    if attn is not None and attn not in row.attn:
        raise ValueError(f"{name} has no {attn} attention; it has: {', '.join(row.attn)}")
    return build(row, attn or row.attn[0], **overrides)


def build(row: Row, attn: str, **overrides):
    """The decoder of a row, which need not stand in the table.

    Raises ValueError for a row outside the table with too many weights, and whatever transformers raises.
    """
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from kvpass.models import counterexamples
    from kvpass.models.seed import seeded

    if row.head == PLAIN:
        return getattr(counterexamples, row.model_type)()
    config_class = CONFIG_MAPPING[row.model_type]
    known = config_class()
    # transformers stores a misspelt keyword without complaint.
    if unknown := [key for key in overrides if not hasattr(known, key)]:
        raise TypeError(f"{row.model_type} configs have no keyword {', '.join(map(repr, unknown))}")
    sizes = {key: value for key, value in SIZES.items() if _takes(known, key)}
    own_name = config_class.attribute_map or {}
    keywords: dict[str, Any] = {own_name.get(k, k): v for k, v in {**sizes, **row.config, **overrides}.items()}
    auto = getattr(transformers, f"AutoModelFor{row.head}")
    config = config_class(**keywords)
    make = partial(auto.from_config, config, attn_implementation=attn, dtype=torch.float32)
    if row.name not in ZOO:
        with torch.device("meta"):
            weights = sum(parameter.numel() for parameter in make().parameters())
        if weights > MOST_WEIGHTS:
            raise ValueError(f"{weights:,} weights with the common sizes: it needs sizes of its own")
    return seeded(make)


def _takes(config, key: str) -> bool:
    own = getattr(type(config), key, None)
    return hasattr(config, key) and not (isinstance(own, property) and own.fset is None)
