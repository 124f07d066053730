"""Models the compiler is built and tested on: one real decoder, tiny random ones, and ones it must refuse.

Importing this package loads neither torch nor transformers. The plain-PyTorch decoders live in
`kvpass.models.plain`, the ones the compiler must refuse in `kvpass.models.counterexamples`.
"""

# Bound here, before anyone imports the submodule of the same name: `kvpass.models.tiny` is the function.
from kvpass.models.tiny import tiny
from kvpass.models.zoo import ZOO

__all__ = ["load", "names", "tiny", "tiny_names"]

_SMOLLM2 = "smollm2"
_TINY_PREFIX = "tiny-"


def names() -> tuple[str, ...]:
    """Every name `load` takes: the real model first, then `tiny-<row>` for each row of the tiny table."""
    return (_SMOLLM2, *(_TINY_PREFIX + name for name in ZOO))


def tiny_names() -> tuple[str, ...]:
    """Every name `tiny` takes, in table order."""
    return tuple(ZOO)


def load(name: str, attn: str | None = None):
    """Return `(model, tokenizer)` for a name in `names()`; nothing is fetched from the network.

    attn is "sdpa" or "eager"; None takes sdpa where the model has it. The model is in eval mode, float32, on the
    CPU. The tokenizer is None for `tiny-*` models, whose 128 token ids stand for nothing.

    Raises ValueError for an unknown name, FileNotFoundError when the model's files are not installed.
    """
    if name == _SMOLLM2:
        from kvpass.models.smollm2 import load_smollm2

        return load_smollm2(attn=attn or "sdpa")
    row = name.removeprefix(_TINY_PREFIX)
    if name.startswith(_TINY_PREFIX) and row in ZOO:
        return tiny(row, attn=attn), None
    raise ValueError(f"unknown model {name!r}; known models: {', '.join(names())}")
