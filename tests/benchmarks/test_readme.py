"""The README's numbers are the committed ones."""

from kvpass.benchmarks.readme import README, updated


def test_tables_come_from_the_committed_results():
    """The README's tables are rendered from benchmarks/results; `python -m kvpass.benchmarks.readme` renews them."""
    text = README.read_text()
    assert updated(text) == text
