"""Every seeded defect still applies to the code, so that `python -m tests.mutations` puts in all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.seeded import SEEDED, Mutation

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", SEEDED, ids=str)
def test_it_applies(mutation: Mutation) -> None:
    assert mutation.old != mutation.new
    compile(mutation.text, mutation.path, "exec")


@pytest.mark.parametrize("mutation", SEEDED, ids=str)
def test_the_tests_that_find_it_exist(mutation: Mutation) -> None:
    for test in mutation.tests:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not name or f"def {name.partition('[')[0]}(" in text


def test_there_are_enough_of_each_part() -> None:
    assert len(SEEDED) >= 60
