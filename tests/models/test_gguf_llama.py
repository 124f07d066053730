import pytest
import torch

from kvpass.models import tiny
from kvpass.models.gguf_llama import LlamaGGUF

gguf = pytest.importorskip("gguf")

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _interleave(weight, heads):
    """llama.cpp's order of rotary rows: the two halves of each head take turns."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def _write(path, model):
    config = model.config
    out = gguf.GGUFWriter(path, "llama")
    out.add_vocab_size(config.vocab_size)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_context_length(config.max_position_embeddings)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(config.rope_parameters["rope_theta"])
    letters = [chr(code) for code in range(33, 33 + 94)]
    out.add_token_list(["<unk>", "<bos>", "<eos>", *letters, "ab"])
    out.add_token_merges(["a b"])
    out.add_token_types([3] * 3 + [1] * 95)
    out.add_unk_token_id(0)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_pad_token_id(2)
    out.add_chat_template("{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}")
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        stem, kind = name.removeprefix("model.").rsplit(".", 1)
        if stem.startswith("layers."):
            _, at, part = stem.split(".", 2)
            if (role := part.split(".")[-1]) in heads:
                weight = _interleave(weight, heads[role])
            target = f"blk.{at}.{NAMES[part]}"
        else:
            target = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[stem]
        out.add_tensor(f"{target}.{kind}", weight.copy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def test_reads_back_what_was_written(tmp_path):
    """Config, weights and tokenizer survive a trip through GGUF's names and rotary order."""
    from transformers import LlamaForCausalLM

    model = tiny("llama")
    _write(tmp_path / "tiny.gguf", model)
    file = LlamaGGUF(tmp_path / "tiny.gguf")
    state = file.state_dict(progress="reading")
    assert state.keys() == model.state_dict().keys()
    again = LlamaForCausalLM(file.config()).eval()
    again.load_state_dict(state)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)

    tokenizer = file.tokenizer()
    assert tokenizer("ab12<eos>")["input_ids"] == [97, 3 + ord("1") - 33, 3 + ord("2") - 33, 2]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<bos>", "<eos>", "<eos>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab<eos>"


def test_missing_gguf_package(monkeypatch, tmp_path):
    """Without the gguf package the error is one sentence with the pip command."""
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match=r"^reading x\.gguf needs the gguf package: pip install gguf$"):
        LlamaGGUF(tmp_path / "x.gguf")
