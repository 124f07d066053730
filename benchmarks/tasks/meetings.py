"""QMSum (arXiv 2104.05938): questions about a part of a meeting, given with the turns around that part."""

from __future__ import annotations

import random
from pathlib import Path

from kvpass.benchmarks.tasks.lengths import fill
from kvpass.benchmarks.tasks.longbench import beginning
from kvpass.benchmarks.tasks.rows import data_file, rows
from kvpass.benchmarks.tasks.sample import Sample

_PREFIX = (
    "You are given a meeting transcript and a query containing a question or instruction. "
    "Answer the query in one or more sentences.\n\nTranscript:\n"
)
_ASK = "\n\nNow, answer the query based on the above meeting transcript in one or more sentences.\n\nQuery: "


def qmsum(tokenizer, length: int, count: int, seed: int, data: Path | None) -> list[Sample]:
    """At most ``count`` queries whose relevant turns fit, with as many turns before and after as fit too."""
    queries = _queries(data_file("qmsum", data, "qmsum_test.jsonl"))
    random.Random(f"qmsum {seed}").shuffle(queries)
    samples: list[Sample] = []
    for key, turns, first, last, asked, answer in queries:
        if len(samples) == count:
            break

        def make(size: int, key=key, turns=turns, first=first, last=last, asked=asked, answer=answer) -> Sample:
            begin = max(0, first - size // 2)  # one turn more after, one turn more before, and so on
            return Sample(
                task="qmsum",
                id=key,
                family="summary",
                prefix=_PREFIX,
                context="\n".join(turns[begin : last + (size + 1) // 2]),
                suffix=f"{_ASK}{asked}\nAnswer:",
                answers=(answer,),
                chat=True,
                metric="rouge_l",
                new_tokens=128,
                gold=beginning(answer, tokenizer),
            )

        if (sample := fill(make, length, tokenizer, most=2 * len(turns))) is not None:
            samples.append(sample)
    if not samples:
        raise ValueError(f"qmsum: the turns of no query fit {length} tokens")
    return samples


def _queries(path: Path) -> list[tuple[str, list[str], int, int, str, str]]:
    """``(id, turns, first and last relevant turn, query, answer)``."""
    found = []
    for meeting, (where, row) in enumerate(rows(path)):
        try:
            turns = [f"{turn['speaker']}: {turn['content']}" for turn in row["meeting_transcripts"]]
            for number, query in enumerate(row["specific_query_list"]):
                spans = [(int(first), int(last)) for first, last in query["relevant_text_span"]]
                first, last = min(first for first, _ in spans), max(last for _, last in spans)
                found.append((f"{meeting}-{number}", turns, first, last, str(query["query"]), str(query["answer"])))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: is not in QMSum's format ({error!r})") from None
    return found
