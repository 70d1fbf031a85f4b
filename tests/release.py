"""`release`: the mark of a test that only `make test-all` runs, and the table of these tests in tests/README.md.

python -m tests.release --write      the table, made again of the marks
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "tests" / "README.md"


def release(why: str, covered_by: str) -> pytest.MarkDecorator:
    """Mark a test, a class of them, a fixture or some of its parameters: only in `make test-all`.

    Args:
        why: it is not in `make test`. If only some parameters have the mark, their ids come first:
            "`[1]`, `[2]`: further ZeRO stages".
        covered_by: the tests of `make test` that find the same bug, each in backticks, as `tests/a/test_b.py::test_c`;
            `::test_c` is in the same file. "the same, `[3]`": this test, with other parameters.
    """
    return pytest.mark.release(why=why, covered_by=covered_by)


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A test, a class of tests or a fixture at the top of a file."""

    #: from the root of the repository.
    path: str
    name: str
    #: of its mark; None if it has none.
    why: str | None
    covered_by: str | None

    def __str__(self) -> str:
        return f"{self.path}::{self.name}"

    @cached_property
    def row(self) -> str:
        """Of the table."""
        covered_by = re.sub("`::", f"`{self.path}::", self.covered_by or "")
        return f"| `{self}` | {self.why} | {covered_by} |"


def definitions() -> list[Definition]:
    """All of the suite, in the order of the files; nothing is imported."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        #: marks with a name: NAME = release(...)
        named = {
            target.id: node.value
            for node in body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and _is_mark(node.value)
        }
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                parts = [part for decorator in node.decorator_list for part in ast.walk(decorator)]
                marks = [part for part in parts if _is_mark(part)]
                marks += [named[part.id] for part in parts if isinstance(part, ast.Name) and part.id in named]
                why, covered_by = map(ast.literal_eval, marks[0].args) if marks else (None, None)
                where = str(path.relative_to(ROOT))
                found.append(Definition(path=where, name=node.name, why=why, covered_by=covered_by))
    return found


def _is_mark(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "release"


def table() -> str:
    """In Markdown."""
    rows = [definition.row for definition in definitions() if definition.why is not None]
    return "\n".join(["| test | why not in `make test` | in `make test` |", "| --- | --- | --- |", *rows]) + "\n"


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    if "--write" in sys.argv:
        README.write_text(re.sub(r"(?m)^\| test \|.*\n(\|.*\n)*", lambda _: table(), text), encoding="utf-8")
    else:
        print(table())
