"""tests/README.md: its table is that of the marks, which name tests of `make test` that exist."""

from __future__ import annotations

import re

from tests.release import README, ROOT, definitions, table


def test_the_table_is_made_of_the_marks() -> None:
    """`python -m tests.release --write` makes it again."""
    assert table() in README.read_text(encoding="utf-8")


def test_every_mark_says_why_and_what_covers_it() -> None:
    mark = re.compile(r"pytest\.mark\.release\b")
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py") if mark.search(path.read_text())]
    assert sorted(files) == ["tests/release.py"]


def test_what_covers_them_is_there() -> None:
    known = definitions()
    for definition in known:
        if definition.covered_by is None or definition.covered_by.startswith("the same"):
            continue
        covers = re.findall(r"`(tests/[^`]+)`", definition.row.rpartition(" | ")[2])
        assert covers, definition
        for other in covers:  # a test, a file or a folder
            under = [one for one in known if str(one) == other or str(one).startswith((f"{other}::", f"{other}/"))]
            assert any(one.covered_by is None or one.covered_by.startswith("the same") for one in under), other
