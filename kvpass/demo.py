"""``kvpass demo``: a real model answers about a long document with all of its cache and with less."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import textwrap
from dataclasses import dataclass
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path

from kvpass.benchmarks import throughput
from kvpass.benchmarks.throughput import Progress
from kvpass.progress import bar

TOPIC = "debugger"  # of pydoc_data.topics: prose about commands, each stated once
QUESTION = "What does the w(here) command do?"
GAP = 3  # columns of blanks between two answers
NARROWEST = 16


@dataclass(frozen=True)
class Options:
    """What to show."""

    budgets: tuple[float | int, ...] = (1.0, 0.2, 0.1)
    policy: str = "unified"
    tokens: int = 48  # of each answer, at most
    length: int = 3000  # of document and question, at most
    steps: int = 16  # timed forwards
    backend: str = "inductor"

    def check(self) -> None:
        """Raises ValueError for what cannot be shown, before any work."""
        from kvpass import policies
        from kvpass.budget import Budget

        policies.get(self.policy)
        for budget in self.budgets:
            Budget.parse(budget)
        for name, least in (("tokens", 1), ("length", 200)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True)
class Answer:
    """What one model said, and the cache it said it from."""

    label: str
    text: str
    mib: float
    entries: int

    def lines(self, width: int) -> list[str]:
        """The answer as a column."""
        head = [self.label, f"{self.mib:.1f} MiB", f"{self.entries:,} entries"]
        return [*(line[:width] for line in head), "-" * width, *textwrap.wrap(self.text, width)]


def run(options: Options, progress: Progress = bar) -> dict:
    """``{"document", "question", "prompt_tokens", "answers", "throughput"}``, all of it ready for JSON.

    Raises:
        ValueError: a budget, policy or count that does not exist.
        FileNotFoundError: the model is not installed; says how to install it.
    """
    options.check()
    load = os.getloadavg()[0]
    import kvpass
    from kvpass import models

    model, tokenizer = models.load("smollm2")

    # A compiled model serves its answer and its row of the table.
    @cache
    def build(budget, policy):
        return kvpass.compile(model, budget=budget, policy=policy, backend=options.backend)

    ids = prompt(tokenizer, options.length)
    makers = [("untouched model", lambda: model)]
    makers += [(f"budget {budget:g}", partial(build, budget, options.policy)) for budget in options.budgets]
    answers = [answer(label, make(), tokenizer, ids, options.tokens) for label, make in progress(makers, "answers")]
    bench = throughput.Options(
        length=ids.shape[1],
        budgets=tuple(budget for budget in options.budgets if budget != 1.0 or isinstance(budget, int)),
        policies=(options.policy,),
        steps=options.steps,
        backend=options.backend,
        rows=("A", "C", "D"),
        anyway=True,
    )
    return {
        "document": f"pydoc_data.topics[{TOPIC!r}]",
        "question": QUESTION,
        "prompt_tokens": ids.shape[1],
        "answers": [vars(given) for given in answers],
        "throughput": throughput.measure(model, tokenizer, bench, build, load, progress),
    }


def prompt(tokenizer, length: int):
    """[1, <= length] token ids of a chat: the paragraphs of the document that fit, and the question."""
    from pydoc_data.topics import topics

    paragraphs = topics[TOPIC].strip().split("\n\n")

    def ids(count: int):
        content = "\n\n".join([*paragraphs[:count], QUESTION])
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return tokenizer(chat, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids

    low, high = 1, len(paragraphs)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ids(middle).shape[1] <= length else (low, middle - 1)
    return ids(low)


def answer(label: str, model, tokenizer, ids, tokens: int) -> Answer:
    """Greedy, so that two models that agree say the same."""
    import torch

    from kvpass import versions
    from kvpass.benchmarks.variants import cache_bytes, cache_entries

    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    said = tokenizer.decode(output.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    held = getattr(output, versions.cache_field())
    return Answer(label, " ".join(said.split()), cache_bytes(held) / 2**20, cache_entries(held))


def columns(answers: list[Answer], width: int) -> str:
    """Answers side by side within ``width`` characters, in as many bands as that takes."""
    fitting = max(1, min(len(answers), (width + GAP) // (NARROWEST + GAP)))
    each = max(NARROWEST, (width + GAP) // fitting - GAP)
    bands = []
    for first in range(0, len(answers), fitting):
        texts = [given.lines(each) for given in answers[first : first + fitting]]
        lines = zip_longest(*texts, fillvalue="")
        bands.append("\n".join((" " * GAP).join(f"{cell:<{each}}" for cell in line).rstrip() for line in lines))
    return "\n\n".join(bands)


def render(result: dict, width: int) -> str:
    """Everything the demo prints."""
    return "\n\n".join(
        [
            f"Document: {result['document']}, {result['prompt_tokens']} tokens with the question.\n"
            f"Question: {result['question']}",
            columns([Answer(**given) for given in result["answers"]], width),
            throughput.table(result["throughput"]),
        ]
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvpass demo``."""
    default = Options()
    parser.add_argument(
        "--budgets",
        type=throughput.budget,
        nargs="+",
        default=list(default.budgets),
        help="fractions of the entries, or above 1 entries per row (default: 1 0.2 0.1)",
    )
    parser.add_argument("--policy", default=default.policy, help="default: %(default)s")
    parser.add_argument(
        "--tokens", type=int, default=default.tokens, help="of each answer, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--length",
        type=int,
        default=default.length,
        help="of the whole prompt, at most (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the answers and every sample")


def command(args: argparse.Namespace) -> int:
    """Run with parsed :func:`add_arguments` and print the result."""
    options = Options(tuple(args.budgets), args.policy, args.tokens, args.length)
    result = run(options)
    print(render(result, shutil.get_terminal_size().columns))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0
