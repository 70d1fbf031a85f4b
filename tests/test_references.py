"""Docstrings and comments name what is there: a rename that forgets them leaves readers without a way to go.

``Two backticks`` may hold anything. `One` is a name of the package, and resolves.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import megaresume

ROOT = Path(megaresume.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

#: `name`, `Class.method`, `call(...)`.
REFERENCE = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\([^`]*\))?`(?!`)")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _references(path: Path) -> list[tuple[int, str]]:
    return [*_in_docstrings(path), *_in_comments(path)]


def _in_docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            text = ast.get_docstring(node, clean=False)
            yield from ((node.body[0].lineno, name) for name in REFERENCE.findall(text or ""))


def _in_comments(path: Path) -> Iterator[tuple[int, str]]:
    if not re.search("#.*`", path.read_text()):
        return
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield from ((token.start[0], name) for name in REFERENCE.findall(token.string))


def _names(tree: ast.AST) -> set[str]:
    """Every identifier that is defined or used below a node; strings, comments and docstrings have none."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                names.add(name)
            case ast.arg(arg=name) | ast.keyword(arg=str(name)) | ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.alias(name=name):
                names.update(name.split("."))
    return names


def test_a_reference_in_a_docstring_or_a_comment_resolves() -> None:
    known = {part for path in FILES for part in path.with_suffix("").relative_to(ROOT.parent).parts}
    for path in FILES:
        known |= _names(_tree(path))
    gone = [
        f"{path.relative_to(ROOT.parent)}:{line}: `{name}`"
        for path in FILES
        for line, name in _references(path)
        if not set(name.split(".")) <= known
    ]
    assert gone == []  # of another package: with two backticks


def test_a_member_that_is_referred_to_is_in_its_class() -> None:
    members: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                members[node.name] |= _names(node)
                bases[node.name] |= {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}

    def found(cls: str, name: str) -> bool:
        return name in members[cls] or any(found(base, name) for base in bases[cls])

    gone = [
        f"{path.relative_to(ROOT.parent)}:{line}: `{name}`"
        for path in FILES
        for line, name in _references(path)
        if name.count(".") == 1 and name.split(".")[0] in members and not found(*name.split("."))
    ]
    assert gone == []
