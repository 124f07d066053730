"""The README says what the contract tests say."""

from tests.contracts.promises import README, updated


def test_the_readme_lists_these_promises():
    """The README's table of promises is the one these tests make; `python -m tests.contracts.promises` renews it."""
    text = README.read_text()
    assert updated(text) == text
