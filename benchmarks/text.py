"""Prompts of real text: the language reference that comes with every Python."""

from __future__ import annotations

import random
from functools import cache


@cache
def reference() -> str:
    """The whole language reference, topic after topic."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def prompt(tokenizer, vocabulary: int, length: int, batch: int, seed: int):
    """[batch, length] int64 token ids of the reference; ``seed`` draws where each row starts.

    Without a tokenizer the ids are the text's bytes, folded into the vocabulary.
    """
    import torch

    text = reference()
    ids = list(text.encode()) if tokenizer is None else tokenizer(text, verbose=False).input_ids
    ids = [token % vocabulary for token in ids] if tokenizer is None else ids
    draw = random.Random(seed)
    rows = []
    for _ in range(batch):
        first = draw.randrange(len(ids))
        rows.append([ids[(first + step) % len(ids)] for step in range(length)])
    return torch.tensor(rows)
