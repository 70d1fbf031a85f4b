"""The wording of every refusal, compared once: elsewhere tests look at the type of an error and at its place."""

from __future__ import annotations

import difflib

from tests.errors.refusals import SNAPSHOT, refusals, snapshot


def test_refusals_say_what_they_said() -> None:
    """If this was meant: ``python -m tests.errors.refusals --write``, and read the difference."""
    before, now = SNAPSHOT.read_text(encoding="utf-8"), snapshot()
    assert now == before, "\n".join(difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=1))


def test_most_say_what_to_do() -> None:
    """A refusal names what was found, and what to do next or what was expected."""
    silent = [block for block in refusals() if "\n    found: " not in block and "\n    action: " not in block]
    assert len(silent) <= 4, "\n\n".join(silent)
