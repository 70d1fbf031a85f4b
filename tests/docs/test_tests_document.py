"""tests/README.md: it has every test that is marked `release`, and names tests of `make test` that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"^\| `([^`]+)` \| (.+) \| (.+) \|$", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE)


def functions() -> dict[str, str]:
    """path::name of every test and fixture -> its decorators."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                found[f"{path.relative_to(ROOT)}::{node.name}"] = " ".join(map(ast.unparse, node.decorator_list))
    return found


def test_every_release_test_is_there() -> None:
    marked = [name for name, decorators in functions().items() if "pytest.mark.release" in decorators]
    assert [name for name, _, _ in ROWS] == marked


def test_what_covers_them_is_there() -> None:
    known = functions()
    for name, _, others in ROWS:
        if others.startswith(("as above", "the same")):
            continue
        covers = re.findall(r"`(tests/[^`]+)`", others)
        assert covers, name
        for other in covers:  # a test, a file or a folder
            under = {
                decorators
                for test, decorators in known.items()
                if test == other or test.startswith((f"{other}::", f"{other}/"))
            }
            assert any("pytest.mark.release" not in decorators for decorators in under), other
