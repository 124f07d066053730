"""Export with dynamic batch and length, shared by the model tests."""

import pytest
import torch

VOCAB = 128


class _Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, position_ids, attention_mask):
        return self.model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False
        ).logits


def inputs(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random token ids, their positions and an all-ones padding mask, int64 [batch, length]."""
    draw = torch.Generator().manual_seed(batch * 1000 + length)
    ids = torch.randint(0, VOCAB, (batch, length), generator=draw)
    positions = torch.arange(length).expand(batch, -1).contiguous()
    return ids, positions, torch.ones_like(ids)


@pytest.fixture
def check_export():
    """A function that exports a model at B=2, S=17 and returns the largest logit error at B=3, S=29."""

    def check(model) -> float:
        batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=512)
        axes = {0: batch, 1: length}
        logits = _Logits(model)
        with torch.no_grad():
            program = torch.export.export(logits, inputs(2, 17), dynamic_shapes=(axes, axes, axes), strict=False)
            other = inputs(3, 29)
            return (program.module()(*other) - logits(*other)).abs().max().item()

    return check
