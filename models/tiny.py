"""Tiny random decoders from transformers' own classes, one table row each.

Every row has 2 layers, hidden size 64, 4 query heads of size 16, 128 token ids and 512 positions unless it
says otherwise. Weights are fixed by a seed and large enough for attention to decide the next token.
"""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

# Names every transformers config understands, through its attribute_map where it spells them differently.
# No token ends a generation: random weights would stop at an arbitrary length.
_SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Tied embeddings make a random decoder repeat its input.
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class TinyDecoder:
    """One row: `config` holds the model_type's own config keywords on top of the common shape."""

    name: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    note: str = ""


_GQA = {"intermediate_size": 128, "num_key_value_heads": 2}
_SLIDING_THEN_FULL = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

_ROWS = (
    TinyDecoder("llama", "llama", _GQA, "grouped queries, 4 over 2"),
    TinyDecoder("llama_mha", "llama", {**_GQA, "num_key_value_heads": 4}, "one KV head per query head"),
    TinyDecoder("llama_mqa", "llama", {**_GQA, "num_key_value_heads": 1}, "one KV head for all"),
    TinyDecoder("mistral", "mistral", {**_GQA, "head_dim": 16, "sliding_window": 8}, "window of 8 tokens"),
    TinyDecoder("mistral_full", "mistral", {**_GQA, "head_dim": 16, "sliding_window": None}, "no window"),
    TinyDecoder("qwen2", "qwen2", _GQA, "biases on query, key and value"),
    TinyDecoder(
        "qwen2_mixed",
        "qwen2",
        {**_GQA, **_SLIDING_THEN_FULL, "use_sliding_window": True},
        "one sliding layer, one full layer",
    ),
    TinyDecoder(
        "gemma3_text",
        "gemma3_text",
        {**_GQA, **_SLIDING_THEN_FULL, "head_dim": 16, "query_pre_attn_scalar": 16},
        "one sliding layer, one full layer; query and key norms; a rotary base per layer type",
    ),
    TinyDecoder("gpt2", "gpt2", {}, "learned positions, fused QKV projection"),
    TinyDecoder("phi", "phi", {"intermediate_size": 128}, "rotary on half of each head, parallel block"),
    TinyDecoder("opt", "opt", {"ffn_dim": 128, "word_embed_proj_dim": 64}, "learned positions with an offset"),
)

TINY = MappingProxyType({row.name: row for row in _ROWS})


def tiny(name: str, attn: str = "sdpa", **overrides):
    """Build the tiny decoder `name`: eval mode, float32, CPU, the same weights on every call.

    attn is "sdpa" or "eager". overrides are config keywords (`num_hidden_layers=1`, `sliding_window=4`);
    both the common names and the model's own spellings work.

    Raises ValueError for an unknown name, TypeError for a keyword the config does not have.
    """
    if name not in TINY:
        raise ValueError(f"unknown tiny decoder {name!r}; known ones: {', '.join(TINY)}")

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from kvpass.models.seed import seeded

    row = TINY[name]
    config_class = CONFIG_MAPPING[row.model_type]
    own_name = config_class.attribute_map or {}
    keywords = {own_name.get(k, k): v for k, v in {**_SHAPE, **row.config, **overrides}.items()}
    # transformers stores a misspelt keyword without complaint.
    known = config_class()
    if unknown := [key for key in overrides if not hasattr(known, key)]:
        raise TypeError(f"{row.model_type} configs have no keyword {', '.join(map(repr, unknown))}")

    config = AutoConfig.for_model(row.model_type, **keywords)
    return seeded(lambda: AutoModelForCausalLM.from_config(config, attn_implementation=attn, dtype=torch.float32))
