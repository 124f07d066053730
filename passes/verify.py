"""Translation validation: the rewritten programs against the untouched model, on a few tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from kvpass.passes.spec import LayerSpec, Refusal, UnsupportedModelError

STEPS = 3
LONGEST = 64
# Relative to the largest logit: rounding of one reordered reduction per layer.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}

Split = Callable[[Tensor, Tensor, int], Tensor]  # (ids, padding, steps) -> logits, prompt first and then token by token


@torch.no_grad()
def compare(model: nn.Module, split: Split, layers: Sequence[LayerSpec]) -> float:
    """Check that a prompt plus single steps give the logits of one uncached forward; the largest relative difference.

    One sequence of the batch is padded on the left, and the sample is longer than a short sliding window.

    Raises:
        UnsupportedModelError: they do not; the rewriting is unsound for this model.
    """
    device = next(model.parameters()).device
    window = max((layer.window for layer in layers), default=0)
    length = min(max(12, 2 * window + STEPS), LONGEST)
    vocabulary = _vocabulary(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (2, length), generator=generator).to(device)
    padding = torch.ones_like(ids)
    padding[1, :2] = 0
    arguments = {"input_ids": ids, "attention_mask": padding, "use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters:
        arguments["position_ids"] = (padding.cumsum(-1) - 1).clamp(min=0)
    output = model(**arguments)
    expected = output if isinstance(output, Tensor) else output.logits
    actual = split(ids, padding, STEPS)
    real = padding.bool()
    expected, actual = expected[real].float(), actual[real].float()
    scale = expected.abs().max().clamp(min=1e-6)
    difference = float(((expected - actual).abs().max() / scale).nan_to_num(torch.inf))
    if difference > TOLERANCE[next(model.parameters()).dtype]:
        raise UnsupportedModelError(
            (
                Refusal(
                    f"a prompt followed by single tokens differs from one forward by {difference:.1e} of the largest "
                    "logit, so something outside the found attentions carries information between tokens",
                    hint="please report this model",
                ),
            )
        )
    return difference


def _vocabulary(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "vocab_size", 0) or next(p for p in model.parameters() if p.ndim == 2).shape[0])
