"""A question about a text, and its token ids: the prompt in three parts, and the answer as a model would go on."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

Family = Literal["language", "retrieval", "qa", "summary", "few-shot", "code", "reasoning"]


@dataclass(frozen=True)
class Sample:
    """One prompt, ``prefix + context + suffix``; only ``context`` may be compressed.

    Every field is text and stays text: nothing in it is a template, a special token, a path or code.
    ``answers`` are alternatives or parts, as ``metric`` (a name in ``METRICS``, or "" for none) reads them.
    ``classes`` are the labels of a classification. With ``chat`` the model's chat template goes around the prompt.
    ``new_tokens`` is how many tokens are to be generated for the metric, 0 when there is none.
    ``gold`` is the text whose likelihood is measured, where that is not the first answer: several answers in a row,
    or the beginning of a long one.
    """

    task: str
    id: str
    family: Family
    prefix: str
    context: str
    suffix: str
    answers: tuple[str, ...]
    classes: tuple[str, ...] = ()
    chat: bool = False
    metric: str = ""
    new_tokens: int = 0
    gold: str = ""

    @property
    def prompt(self) -> str:
        """The three parts in order."""
        return self.prefix + self.context + self.suffix


@dataclass(frozen=True)
class Tokens:
    """Token ids; the model is fed ``prefix + context + suffix``, and ``gold`` is what the answer adds."""

    prefix: tuple[int, ...]
    context: tuple[int, ...]
    suffix: tuple[int, ...]
    gold: tuple[int, ...]

    @property
    def prompt(self) -> tuple[int, ...]:
        """The three parts in order."""
        return self.prefix + self.context + self.suffix


def encode(sample: Sample, tokenizer) -> Tokens:
    """The sample's ids; the prompt is tokenised as a whole and a token belongs to the part it begins in.

    A chat template adds its head to ``prefix`` and its tail to ``suffix``; a tokenizer without a template gets the
    prompt as it is. What looks like a special token in the sample's text is tokenised as the characters it is made
    of. Without a tokenizer ids are bytes.

    Raises:
        ValueError: the tokenizer cannot say which characters a token covers, or its chat template repeats the text.
    """
    head, tail = _around(sample, tokenizer)
    ids, ends = tokens_of(sample.prompt, tokenizer)
    begins = [0, *ends[:-1]]
    first, second = (bisect_left(begins, chars) for chars in (len(sample.prefix), len(sample.prefix + sample.context)))
    gold = _gold(sample, ids, tokenizer, answers_alone=bool(tail))
    return Tokens((*head, *ids[:first]), tuple(ids[first:second]), (*ids[second:], *tail), tuple(gold))


def tokens_of(text: str, tokenizer) -> tuple[list[int], list[int]]:
    """``(ids, ends)``: the ids of plain text, and for each the number of characters up to its end."""
    if tokenizer is None:
        spelled = [char.encode("utf-8", "replace") for char in text]
        return [byte for char in spelled for byte in char], [end for end, char in enumerate(spelled, 1) for _ in char]
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("evaluation needs a fast tokenizer, which says what characters each token covers")
    out = tokenizer(
        text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
    )
    return list(out["input_ids"]), [end for _, end in out["offset_mapping"]]


def _gold(sample: Sample, ids: list[int], tokenizer, answers_alone: bool) -> list[int]:
    """What the answer adds: with the space that parts it from the prompt, and tokenised as running text."""
    prompt, answer = sample.prompt, sample.gold or "".join(sample.answers[:1])
    if answers_alone:
        return tokens_of(answer, tokenizer)[0]
    together = sample.family == "language" or prompt[-1:].isspace() or answer[:1].isspace()
    answer = answer if together else f" {answer}"
    joined = tokens_of(prompt + answer, tokenizer)[0]
    # Where prompt and answer share a token, the model is still fed the prompt alone.
    return joined[len(ids) :] if joined[: len(ids)] == ids else tokens_of(answer, tokenizer)[0]


def _around(sample: Sample, tokenizer) -> tuple[list[int], list[int]]:
    """Ids before and after the prompt: the chat template's, or the token a text begins with."""
    if tokenizer is None:
        return [], []
    if not (sample.chat and tokenizer.chat_template):
        begin = tokenizer.bos_token_id
        return ([begin] if begin is not None and list(tokenizer("").input_ids)[:1] == [begin] else []), []
    mark = "\u2402"  # the template is filled with a mark, never with the sample's text
    filled = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    if filled.count(mark) != 1:
        raise ValueError("the tokenizer's chat template does not contain what the user says exactly once")
    return tuple(tokenizer(part, add_special_tokens=False).input_ids for part in filled.split(mark))
