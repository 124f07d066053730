"""Scores, by hand."""

import pytest

from kvpass.benchmarks.tasks import METRICS

BY_HAND = [  # metric, prediction, answers, classes, score
    ("f1", "The red, red fox.", ("a red fox",), (), 2 * 2 / (3 + 2)),
    ("f1", "blue", ("red fox", "Blue!"), (), 1.0),
    ("f1", "", ("red",), (), 0.0),
    ("f1", "the", ("a",), (), 1.0),
    ("f1_line", "\nred\nQuestion: what fox?", ("red",), (), 1.0),
    ("rouge_l", "the cat sat down", ("The cat lay down.",), (), 0.75),
    ("rouge_l", "", ("the cat",), (), 0.0),
    ("rouge_l", "a b", ("x", "b"), (), 2 / 3),
    ("rouge_l_line", "the cat\nDialogue: no", ("the cat",), (), 1.0),
    ("accuracy", "Date", ("Date",), ("Date", "Food"), 1.0),
    ("accuracy", "Date or Food", ("Date",), ("Date", "Food"), 0.5),
    ("accuracy", "Other location", ("Other location",), ("Other location", "location"), 1.0),
    ("accuracy", "location", ("Other location",), ("Other location", "location"), 0.0),
    ("accuracy", "Food\nDate", ("Date",), ("Date", "Food"), 0.0),
    ("edit_similarity", "# why\n    return x\nmore", ("    return x",), (), 1.0),
    ("edit_similarity", "abcd", ("abxd",), (), 0.75),
    ("edit_similarity", "```\n", ("x",), (), 0.0),
    ("match_all", "It is 12 and AB.", ("12", "ab", "cd", "34"), (), 0.5),
    ("match_any", "It is ab.", ("12", "AB"), (), 1.0),
    ("match_any", "It is not.", ("12",), (), 0.0),
]


@pytest.mark.parametrize(("metric", "prediction", "answers", "classes", "score"), BY_HAND)
def test_scores_by_hand(metric, prediction, answers, classes, score):
    """Each metric gives the value worked out by hand."""
    assert METRICS[metric](prediction, answers, classes) == pytest.approx(score)


def test_every_metric_is_worked_out():
    """No metric without an example."""
    assert {row[0] for row in BY_HAND} == set(METRICS)
