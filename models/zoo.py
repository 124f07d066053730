"""The zoo: one tiny random decoder of every causal-LM family of transformers, one table row each.

A row names only what differs from `SIZES`: the builder gives a config those sizes that it has a keyword for. `refused`
holds the words that the compiler must refuse the row with. Where layers differ, a row has one of each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

# Every spelling of a size that transformers' decoders have. No token ends a generation, and tied embeddings would make
# a random decoder repeat its input.
SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "intermediate_size": 128,
        "ffn_dim": 128,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts": 4,
        "n_routed_experts": 4,
        "moe_num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
)

CAUSAL, SEQ2SEQ, PLAIN = "CausalLM", "Seq2SeqLM", "plain"
BOTH, SDPA, EAGER = ("sdpa", "eager"), ("sdpa",), ("eager",)
SLIDING_THEN_FULL = ("sliding_attention", "full_attention")


@dataclass(frozen=True)
class Row:
    """One tiny decoder: `config` holds its own keywords on top of `SIZES`."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    family: str = ""  # transformers' model_type; the row's name when empty
    attn: tuple[str, ...] = BOTH  # implementations the family has
    refused: str = ""  # words of the refusal; empty: must compile
    attentions: int = 0  # how many there are; 0: one a layer
    head: str = CAUSAL  # which of transformers' AutoModelFor… classes builds it; PLAIN: a counter-example

    @property
    def model_type(self) -> str:
        return self.family or self.name

    @property
    def checked(self) -> tuple[str, ...]:
        """Implementations to check: all, and one where the model is refused, whichever it is asked for."""
        return self.attn[:1] if self.refused else self.attn


_MIXED = {"layer_types": list(SLIDING_THEN_FULL)}
_MHA = {"num_key_value_heads": 4}
# The rotary part is all that transformers calls a head's size where keys are compressed.
_MLA = {"head_dim": 8, "num_key_value_heads": 4}
_MLA_NOTE = "compressed keys and values, wider keys than values"

_EXPERT_LOOP = "model: its code branches on what it computes, as a loop over the experts that were hit does"

_ROWS = (
    # one full-attention block, in every dialect
    Row("llama", note="grouped queries, 4 over 2"),
    Row("llama_mha", _MHA, "one KV head per query head", family="llama"),
    Row("llama_mqa", {"num_key_value_heads": 1}, "one KV head for all", family="llama"),
    Row(
        "llama3_scaling",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        "frequencies scaled as Llama 3 does",
        family="llama",
    ),
    Row(
        "llama_yarn",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        "YaRN: scaled frequencies and a factor on cos and sin",
        family="llama",
    ),
    Row("apertus"),
    Row("arcee"),
    Row("biogpt", _MHA),
    Row("bitnet"),
    Row("codegen", {"n_ctx": 512, "rotary_dim": 8}),
    Row("cohere"),
    Row("ctrl", {"dff": 128}),
    Row("ernie4_5"),
    Row("exaone"),
    Row("flex_olmo"),
    Row("gemma"),
    Row("glm"),
    Row("glm4"),
    Row("gpt2", note="learned positions, fused QKV projection"),
    Row("gpt_bigcode"),
    Row("gpt_neox", {"rotary_pct": 0.25}),
    Row("gpt_neox_japanese", attn=EAGER),
    Row("gptj", {"rotary_dim": 8}),
    Row("granite"),
    Row("helium"),
    Row("hunyuan_v1_dense"),
    Row("jetmoe", {"kv_channels": 16}),
    Row("nemotron"),
    Row("olmo"),
    Row("olmo2"),
    Row("opt", {"word_embed_proj_dim": 64}, "learned positions with an offset"),
    Row("persimmon"),
    Row("phi", _MHA, "rotary on half of each head, parallel block"),
    Row("qwen3"),
    Row("seed_oss"),
    Row("smollm3"),
    Row("stablelm"),
    Row("xglm", attn=EAGER),
    # windows and chunks
    Row("mistral", note="window of 8 tokens"),
    Row("mistral_full", {"sliding_window": None}, "no window", family="mistral"),
    Row("ministral", _MIXED),
    Row("phi3"),
    Row("starcoder2"),
    Row("qwen2", note="biases on query, key and value"),
    Row("qwen2_mixed", {**_MIXED, "use_sliding_window": True}, "one sliding layer, one full layer", family="qwen2"),
    Row("gemma2", _MIXED, "soft cap, sandwich norms", attn=EAGER),
    Row("gemma3_text", {**_MIXED, "query_pre_attn_scalar": 16}),
    Row(
        "gemma3n_text",
        {
            "num_hidden_layers": 4,
            "layer_types": list(SLIDING_THEN_FULL) * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 128,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        "the last two layers read the keys and values of the first two",
    ),
    Row("vaultgemma", _MIXED, attn=EAGER),
    Row("gpt_neo", {"window_size": 8, "attention_types": [[["global", "local"], 1]]}, attn=EAGER),
    Row("cohere2", _MIXED),
    Row("olmo3", _MIXED),
    Row("exaone4", _MIXED),
    Row(
        "llama4_text",
        {
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "moe_layers": [1],
            "intermediate_size_mlp": 128,
        },
        "one chunked layer, one full layer without rotary; dense, then experts",
    ),
    Row("gpt_oss", _MIXED, "sinks; one sliding layer, one full layer; experts", attn=EAGER),
    # experts
    Row("mixtral"),
    Row("qwen2_moe"),
    Row("qwen3_moe"),
    Row("phimoe"),
    Row("granitemoe"),
    Row("olmoe"),
    Row("dots1"),
    Row("glm4_moe"),
    Row("ernie4_5_moe"),
    Row("deepseek_v2", _MLA, _MLA_NOTE),
    Row("deepseek_v3", _MLA, _MLA_NOTE),
    # biases, pairs of attentions
    Row("bloom", attn=EAGER),
    Row("mpt", attn=EAGER),
    Row("falcon"),
    Row("falcon_alibi", {"alibi": True}, family="falcon"),
    Row("diffllama", attentions=4, note="two attentions a layer, one subtracted from the other"),
    Row(
        "openai-gpt",
        note="multiplies the logits by the mask before it hides them; its generate() has no cache, a call may",
        attn=EAGER,
    ),
    # what must be refused
    Row(
        "dbrx",
        {
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        },
        "a loop over the experts that were hit",
        refused=_EXPERT_LOOP,
    ),
    Row(
        "longcat_flash",
        {
            **_MLA,
            "num_layers": 1,
            "ffn_hidden_size": 128,
            "expert_ffn_hidden_size": 32,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
        "a loop over the experts that were hit",
        refused=_EXPERT_LOOP,
    ),
    Row(
        "doge",
        {"keep_window_size": 2048},
        "the mask is computed from the values",
        refused="model.layers.0.self_attn: the mask depends on activations; "
        "model.layers.1.self_attn: the mask depends on activations",
    ),
    Row(
        "jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
        refused="model: its code fixes the batch or the length, as a loop over the tokens does",
    ),
    Row(
        "bamba",
        {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 8},
        refused="model.layers.0.mamba: mixes tokens outside attention (aten.slice.Tensor)",
    ),
    Row(
        "zamba2",
        {
            "layers_block_type": ["linear_attention", "hybrid"],
            "n_mamba_heads": 8,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
        refused="model.layers.0.mamba: mixes tokens outside attention (aten.slice.Tensor)",
    ),
    Row(
        "lfm2",
        {"layer_types": ["conv", "full_attention"]},
        refused="model.layers.0.conv: mixes tokens outside attention (aten.slice.Tensor)",
    ),
    Row(
        "mamba2",
        {"num_heads": 8, "state_size": 8, "n_groups": 1},
        attn=EAGER,
        refused="model: no attention over the sequence was found",
    ),
    Row(
        "minimax",
        {"layer_types": ["linear_attention", "full_attention"]},
        refused="model.layers.0.self_attn: mixes tokens outside attention (aten.matmul.default)",
    ),
    Row(
        "qwen3_next",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        refused="model.layers.0.linear_attn: mixes tokens outside attention (aten.slice.Tensor)",
    ),
    Row(
        "prefix_lm",
        note="a prefix that sees itself",
        attn=SDPA,
        head=PLAIN,
        refused="blocks.0.mixer: the mask is prefix(4); blocks.1.mixer: the mask is prefix(4)",
    ),
    Row(
        "image_tokens",
        note="image tokens that see each other",
        attn=SDPA,
        head=PLAIN,
        refused="blocks.0.mixer: the mask depends on the tokens themselves; "
        "blocks.1.mixer: the mask depends on the tokens themselves",
    ),
    Row(
        "t5",
        {"num_layers": 2, "d_ff": 128, "d_kv": 16},
        attn=EAGER,
        refused="model: is an encoder-decoder, and only decoders are supported",
        head=SEQ2SEQ,
    ),
)

ZOO: Mapping[str, Row] = MappingProxyType({row.name: row for row in _ROWS})
