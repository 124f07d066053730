"""Scores of a generated answer against the right ones, each from 0 to 1: ``(prediction, answers, classes)``."""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

Metric = Callable[[str, Sequence[str], Sequence[str]], float]

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles, as SQuAD's scorer compares them."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def f1(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Harmonic mean of precision and recall over words, against the nearest answer (SQuAD)."""
    return max(_f1(words(prediction), words(answer)) for answer in answers)


def _f1(predicted: list[str], wanted: list[str]) -> float:
    if not (predicted and wanted):
        return float(predicted == wanted)
    return 2 * sum((Counter(predicted) & Counter(wanted)).values()) / (len(predicted) + len(wanted))


def rouge_l(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """F measure of the longest common subsequence of words, against the nearest answer (package rouge-score).

    Raises:
        ModuleNotFoundError: rouge-score is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError:
        raise ModuleNotFoundError("ROUGE-L needs rouge-score: pip install 'kvpass[eval]'") from None
    scorer = RougeScorer(["rougeL"])
    return max(scorer.score(answer, prediction)["rougeL"].fmeasure for answer in answers)


def accuracy(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """1 when the first line names the right class, divided by how many classes it names (LongBench's trec).

    A class that is only part of the right class's name does not count as named.
    """
    line, right = _first_line(prediction), answers[0]
    named = [name for name in classes if name in line and (name == right or name not in right)]
    return 1 / len(named) if right in named else 0.0


def edit_similarity(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Share of matching characters with the first line that is code: no comment and no fence (LongBench's lcc)."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return max(difflib.SequenceMatcher(None, line, answer, autojunk=False).ratio() for answer in answers)


def match_all(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Share of the answers that occur in the prediction (RULER's recall)."""
    return sum(answer.lower() in prediction.lower() for answer in answers) / len(answers)


def match_any(prediction: str, answers: Sequence[str], classes: Sequence[str] = ()) -> float:
    """1 when any answer occurs in the prediction (RULER's questions)."""
    return float(any(answer.lower() in prediction.lower() for answer in answers))


def _first_line(text: str) -> str:
    return text.lstrip("\n").split("\n", 1)[0]


def _of_first_line(metric: Metric) -> Metric:
    return lambda prediction, answers, classes=(): metric(_first_line(prediction), answers, classes)


METRICS: dict[str, Metric] = {
    "f1": f1,
    "f1_line": _of_first_line(f1),  # few-shot prompts go on with the next example: only the first line is an answer
    "rouge_l": rouge_l,
    "rouge_l_line": _of_first_line(rouge_l),
    "accuracy": accuracy,
    "edit_similarity": edit_similarity,
    "match_all": match_all,
    "match_any": match_any,
}
