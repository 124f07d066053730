"""Windows of running text."""

import pytest

from kvpass.benchmarks.tasks import TASKS, encode
from kvpass.benchmarks.text import reference


def test_windows_of_the_reference():
    """24 different windows, at most as long as asked and nearly so, each with the text that follows it."""
    samples = TASKS["pydoc"](None, 2048, 24, 0, None)
    assert len({sample.id for sample in samples}) == 24
    for sample in samples:
        assert sample.context + sample.answers[0] in reference()
        assert 2048 * 0.9 < len(encode(sample, None).prompt) <= 2048
        assert 200 < len(encode(sample, None).gold) <= 256
        assert not sample.context[0].isspace() and sample.answers[0][0].isspace()


def test_files_take_turns(tmp_path):
    """With data the windows come in turn from each text file; the same seed gives the same ones, another others."""
    (tmp_path / "text").mkdir()
    for name in ("a", "b"):
        (tmp_path / "text" / f"{name}.txt").write_text(f"{name} word " * 4000)
    samples = TASKS["language"](None, 256, 5, 0, tmp_path)
    assert [sample.id.split("-")[0] for sample in samples] == ["a", "b", "a", "b", "a"]
    assert samples == TASKS["language"](None, 256, 5, 0, tmp_path)
    assert samples != TASKS["language"](None, 256, 5, 1, tmp_path)


def test_short_text_is_refused(tmp_path):
    """A file too short for the windows is refused by name."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "tiny.txt").write_text("a word")
    with pytest.raises(ValueError, match="tiny: is too short"):
        TASKS["language"](None, 256, 1, 0, tmp_path)
