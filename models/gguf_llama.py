"""Read a Llama-architecture GGUF file into a transformers config, float32 weights and tokenizer.

transformers reads GGUF itself, but only with the accelerate package installed, and the model it makes
refuses to be saved.
"""

from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

_CONTROL_TOKEN = 3

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class LlamaGGUF:
    """An opened GGUF file. Raises ModuleNotFoundError, with the pip command, when `gguf` is not installed."""

    def __init__(self, path: Path):
        try:
            import gguf
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                f"reading {path.name} needs the gguf package: pip install gguf", name="gguf"
            ) from missing
        self._dequantize = gguf.dequantize
        self._reader = gguf.GGUFReader(path)

    def _get(self, key: str):
        return self._reader.fields[key].contents()

    def config(self):
        """The model's shape as a LlamaConfig, with no quantization entry."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self._get("llama.vocab_size"),
            hidden_size=self._get("llama.embedding_length"),
            intermediate_size=self._get("llama.feed_forward_length"),
            num_hidden_layers=self._get("llama.block_count"),
            num_attention_heads=self._get("llama.attention.head_count"),
            num_key_value_heads=self._get("llama.attention.head_count_kv"),
            max_position_embeddings=self._get("llama.context_length"),
            rms_norm_eps=self._get("llama.attention.layer_norm_rms_epsilon"),
            rope_parameters={"rope_type": "default", "rope_theta": self._get("llama.rope.freq_base")},
            tie_word_embeddings=all(tensor.name != "output.weight" for tensor in self._reader.tensors),
            bos_token_id=self._get("tokenizer.ggml.bos_token_id"),
            eos_token_id=self._get("tokenizer.ggml.eos_token_id"),
            pad_token_id=self._get("tokenizer.ggml.padding_token_id"),
            dtype="float32",
        )

    def state_dict(self, progress: str) -> dict[str, torch.Tensor]:
        """Every weight as float32 under its transformers name; `progress` titles the bar a terminal shows."""
        heads = {
            "attn_q": self._get("llama.attention.head_count"),
            "attn_k": self._get("llama.attention.head_count_kv"),
        }
        state = {}
        for tensor in tqdm(self._reader.tensors, desc=progress, unit="tensor", leave=False, disable=None):
            *layer, part, kind = tensor.name.split(".")
            weight = np.asarray(self._dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            if part in heads:
                weight = _halves(weight, heads[part])
            name = f"model.layers.{layer[1]}.{_LAYER_TENSORS[part]}" if layer else _TENSORS[part]
            state[f"{name}.{kind}"] = torch.from_numpy(np.array(weight, order="C"))
        return state

    def tokenizer(self):
        """A PreTrainedTokenizerFast: byte-level BPE that splits digits, with the file's chat template."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        tokens = self._get("tokenizer.ggml.tokens")
        merges = [tuple(pair.split(" ")) for pair in self._get("tokenizer.ggml.merges")]
        kinds = self._get("tokenizer.ggml.token_type")
        bpe = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        bpe.decoder = decoders.ByteLevel()
        bpe.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind == _CONTROL_TOKEN
            ]
        )
        special = {
            f"{role}_token": tokens[self._get(f"tokenizer.ggml.{key}_token_id")]
            for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        }
        return PreTrainedTokenizerFast(
            tokenizer_object=bpe,
            model_max_length=self._get("llama.context_length"),
            chat_template=self._get("tokenizer.chat_template"),
            clean_up_tokenization_spaces=False,
            **special,
        )


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    # GGUF interleaves the two rotary halves of each head; transformers keeps them one after the other.
    return weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
