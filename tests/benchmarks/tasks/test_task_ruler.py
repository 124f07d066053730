"""The generated tasks: what is hidden is there, once, and the prompt fills the length."""

import re

import pytest

from kvpass.benchmarks.tasks import TASKS, encode
from kvpass.benchmarks.tasks.needles import NEEDLES
from kvpass.benchmarks.tasks.vocabulary import NOISE

GENERATED = (*NEEDLES, "vt", "cwe", "fwe")
LENGTH = 4000  # bytes


def samples(name, seed=0, count=2):
    return TASKS[name](None, LENGTH, count, seed, None)


@pytest.mark.parametrize("name", GENERATED)
def test_fills_the_length_and_repeats(name):
    """At most the wanted length and more than nine tenths of it, and the same again for the same seed only."""
    made = samples(name)
    assert all(LENGTH * 0.9 < len(encode(sample, None).prompt) <= LENGTH for sample in made)
    assert made == samples(name)
    assert made[0] != made[1] and made[0] != samples(name, seed=1)[0]
    assert made[0].metric == "match_all" and made[0].task == name and made[0].new_tokens > 0


@pytest.mark.parametrize("name", NEEDLES)
def test_each_needle_stands_once(name):
    """Every value asked for stands in the context once, after its key, and the question does not give it away."""
    task = NEEDLES[name]
    for sample in samples(name):
        asked = (
            re.search(r"for (.*?) mentioned", sample.suffix)[1].replace(" and ", ", ").replace(",,", ",").split(", ")
        )
        assert len(asked) == task.queries and len(sample.answers) == task.queries * task.values
        assert sample.context.count("special magic") >= task.keys * task.values
        owners = asked if task.values == 1 else asked * task.values
        for key, value in zip(owners, sample.answers, strict=True):
            assert sample.context.count(value) == 1 and value not in sample.prefix + sample.suffix
            assert re.search(f"One of the special magic (numbers|uuids) for {key} is: {value}\\.", sample.context)


def test_values_are_listed_in_the_order_of_the_text():
    """With several values for one key the expected answer lists them as they stand in the text."""
    for sample in samples("niah_multivalue"):
        places = [sample.context.index(value) for value in sample.answers]
        assert places == sorted(places)
        assert sample.gold == "{}, {}, {}, and {}".format(*sample.answers)


def test_the_haystack_is_what_the_name_says():
    """Noise around the first task's needle, sentences around the second's, other needles around multikey_2's."""
    noise = samples("niah_single_1")[0]
    assert {line for line in noise.context.split("\n") if noise.answers[0] not in line} == {NOISE}
    assert NOISE not in samples("niah_single_2")[0].context
    lines = samples("niah_multikey_2")[0].context.split("\n")
    assert all(line.startswith("One of the special magic numbers for ") for line in lines)


def test_a_chain_is_in_order():
    """The five variables are assigned one after the other; the solved example is about others."""
    for sample in samples("vt"):
        value = re.search(r"value (\d+)", sample.suffix)[1]
        expected = [(sample.answers[0], value)]
        expected += [(name, f"VAR {before}") for before, name in zip(sample.answers, sample.answers[1:], strict=False)]
        assert re.findall(r"VAR (\w+) = ((?:VAR )?\w+)", sample.context) == expected
        assert not any(name in sample.prefix for name in sample.answers)


def test_common_words_are_the_most_common():
    """Ten words six times each, every other word once, numbered without a gap."""
    for sample in samples("cwe"):
        numbered = re.findall(r"(\d+)\. (\w+)", sample.context)
        assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
        words = [word for _, word in numbered]
        assert {word for word in words if words.count(word) == 6} == set(sample.answers)
        assert {words.count(word) for word in set(words)} == {1, 6}


def test_frequent_words_follow_the_dots():
    """The three answers are the most frequent words after the dots, in this order and without a tie."""
    for sample in samples("fwe"):
        words = sample.context.split(" ")
        ranked = sorted(set(words), key=words.count, reverse=True)
        assert tuple(ranked[:4]) == ("...", *sample.answers)
        counts = [words.count(word) for word in ranked[:5]]
        assert len(set(counts)) == 5


@pytest.mark.parametrize("name", ["niah_single_1", "vt", "cwe", "fwe"])
def test_too_short_is_refused(name):
    """A length that holds no question is refused in one sentence that names the task."""
    with pytest.raises(ValueError, match=f"{name}: 100 tokens do not hold"):
        TASKS[name](None, 100, 1, 0, None)
