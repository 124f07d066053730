"""LongBench's English tasks (arXiv 2308.14508), from its files or from files of complete prompts.

A row is ``{"prompt", "answers"}``, where the prompt is complete and is split into its parts here, or LongBench's own
``{"context", "input", "answers"}``, around which the same words are put; ``all_classes`` where there are classes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvpass.benchmarks.tasks.lengths import count as tokens
from kvpass.benchmarks.tasks.lengths import cut_middle, fill, words_within
from kvpass.benchmarks.tasks.rows import data_file, rows, text, texts
from kvpass.benchmarks.tasks.sample import Family, Sample

_GOLD_TOKENS = 160  # of a long answer whose likelihood is measured

Cut = Callable[[Sample, int, object], Sample | None]


def whole(sample: Sample, length: int, tokenizer) -> Sample | None:
    """The sample if it fits; a question about a text that was cut may have no answer."""
    return sample if tokens(sample, tokenizer) <= length else None


def drop_shots(sample: Sample, length: int, tokenizer) -> Sample | None:
    """The sample with as many of its last examples as fit: whole ones, and at least one."""
    mark = LONGBENCH[sample.task].shot
    starts = [found.start() for found in re.finditer(f"^{re.escape(mark)}", sample.context, re.MULTILINE)]

    def last(size: int) -> Sample:
        return replace(sample, context=sample.context[starts[-size] :])

    return fill(last, length, tokenizer, most=len(starts)) if starts else None


@dataclass(frozen=True)
class Layout:
    """How a task's prompt is put together, ``head + context + tail + input + end``, and taken apart again: what is
    compressed lies between ``head`` and the last ``mark``."""

    family: Family
    metric: str
    new_tokens: int
    head: str
    mark: str
    tail: str = ""
    end: str = ""
    cut: Cut = whole
    shot: str = ""
    chat: bool = True
    files: tuple[str, ...] = ()

    def parts(self, row: dict, where: str) -> tuple[str, str, str]:
        """Prefix, context and suffix of a row; ValueError when it is not laid out like this."""
        if "prompt" in row:
            prompt = text(row, "prompt", where)
        else:
            prompt = self.head + text(row, "context", where) + self.tail + text(row, "input", where, "") + self.end
        last = prompt.rfind(self.mark)
        if not prompt.startswith(self.head) or last < len(self.head):
            raise ValueError(f"{where}: is not laid out like LongBench's task: {self.head[:40]!r}…")
        return self.head, prompt[len(self.head) : last], prompt[last:]


def longbench(name: str, tokenizer, length: int, count: int, seed: int, data: Path | None) -> list[Sample]:
    """At most ``count`` samples of one task, drawn by ``seed``; of more than half of ``length`` if there are enough."""
    layout = LONGBENCH[name]
    path = data_file(name, data, *(layout.files or (f"longbench/{name}.jsonl", f"longbench_mini/{name}.jsonl")))
    found = [_sample(name, layout, row, where, tokenizer) for where, row in rows(path)]
    random.Random(f"{name} {seed}").shuffle(found)
    return pick(name, found, layout.cut, tokenizer, length, count)


def pick(name: str, found: list[Sample], cut: Cut, tokenizer, length: int, count: int) -> list[Sample]:
    """The first ``count`` samples that fit after ``cut``, those of more than half of ``length`` before the others."""
    long: list[Sample] = []
    short: list[Sample] = []
    for sample in found:
        if len(long) == count:
            break
        if (fitting := cut(sample, length, tokenizer)) is not None:
            (long if tokens(fitting, tokenizer) * 2 > length else short).append(fitting)
    if not (long or short):
        raise ValueError(f"{name}: none of {len(found)} rows fits {length} tokens")
    return (long + short)[:count]


def beginning(answer: str, tokenizer) -> str:
    """The part of a long answer whose likelihood is measured."""
    return answer[: words_within(answer, _GOLD_TOKENS, tokenizer)]


def _sample(name: str, layout: Layout, row: dict, where: str, tokenizer) -> Sample:
    prefix, context, suffix = layout.parts(row, where)
    answers = texts(row, "answers", where)
    if not any(answers):
        raise ValueError(f"{where}: 'answers' is empty")
    return Sample(
        task=name,
        id=str(row.get("id") or row.get("_id") or where.rpartition(" ")[2]),
        family=layout.family,
        prefix=prefix,
        context=context,
        suffix=suffix if layout.chat else suffix.rstrip(" "),  # words are tokenised with the space before them
        answers=answers,
        classes=texts({**row, "all_classes": row.get("all_classes") or []}, "all_classes", where),
        chat=layout.chat,
        metric=layout.metric,
        new_tokens=layout.new_tokens,
        gold=beginning(answers[0], tokenizer) if layout.family == "summary" else _told(answers, context),
    )


def _told(answers: tuple[str, ...], context: str) -> str:
    """The first answer that the context spells out, else the first: alternatives come in no order."""
    return next((answer for answer in answers if answer and answer in context), answers[0])


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n"
)
_ASK = (
    "\n\nAnswer the question based on the given passages. Only give me the answer and do not output any other words."
    "\n\nQuestion: "
)
_QA = Layout("qa", "f1", 24, _PASSAGES, mark=_ASK, tail=_ASK, end="\nAnswer:")
_FIELD = (
    "\n\nNow, answer the following question based on the above text, only give me the answer and do not output any "
    "other words.\n\nQuestion: "
)
_STORY = (
    "\n\nNow, answer the question based on the story as concisely as you can, using a single phrase if possible. "
    "Do not provide any explanation.\n\nQuestion: "
)
_NEWS = "\n\nNow, write a one-page summary of all the news.\n\nSummary:"
_REPORT = "\n\nNow, write a one-page summary of the report.\n\nSummary:"
_CODE = Layout(
    "code",
    "edit_similarity",
    48,
    "Please complete the code given below. \n",
    mark="Next line of code:\n",
    end="Next line of code:\n",
    chat=False,
)

LONGBENCH: dict[str, Layout] = {
    "qasper": _QA,
    "multifieldqa_en": Layout(
        "qa",
        "f1",
        24,
        "Read the following text and answer briefly.\n\n",
        mark=_FIELD,
        tail=_FIELD,
        end="\nAnswer:",
    ),
    "narrativeqa": Layout(
        "qa",
        "f1",
        24,
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question as "
        "concisely as you can, using a single phrase if possible. Do not provide any explanation.\n\nStory: ",
        mark=_STORY,
        tail=_STORY,
        end="\n\nAnswer:",
        cut=cut_middle,
    ),
    "2wikimqa": _QA,
    "musique": replace(_QA, cut=cut_middle),
    "hotpotqa_long": replace(_QA, cut=cut_middle, files=("longbench/hotpotqa.jsonl", "longbench_mini/hotpotqa.jsonl")),
    "gov_report": Layout(
        "summary",
        "rouge_l",
        128,
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n",
        mark=_REPORT,
        end=_REPORT,
    ),
    "multi_news": Layout(
        "summary",
        "rouge_l",
        128,
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n",
        mark=_NEWS,
        end=_NEWS,
        files=("longbench_multi_news_200.jsonl", "longbench/multi_news.jsonl", "longbench_mini/multi_news.jsonl"),
    ),
    "trec": Layout(
        "few-shot",
        "accuracy",
        16,
        "Please determine the type of the question below. Here are some examples of questions.\n\n",
        mark="\nQuestion: ",
        tail="\n",
        cut=drop_shots,
        shot="Question: ",
        chat=False,
    ),
    "triviaqa": Layout(
        "few-shot",
        "f1_line",
        16,
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n",
        mark="\nQuestion:\n",
        tail="\n\n",
        cut=drop_shots,
        shot="Passage:\n",
        chat=False,
    ),
    "samsum": Layout(
        "few-shot",
        "rouge_l_line",
        48,
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n",
        mark="\nDialogue: ",
        tail="\n\n",
        cut=drop_shots,
        shot="Dialogue: ",
        chat=False,
    ),
    "lcc": _CODE,
    "repobench-p": _CODE,
}
