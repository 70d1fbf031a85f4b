"""Which integration a document was made with: a hash of the code that decides whether an upstream works."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import subprocess
import tokenize
from pathlib import Path

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

_OWN_NAME = re.compile(r"\bmegaresume(?:\.\w+)*\.(\w+)")

ROOT = Path(__file__).resolve().parents[2]


def files(root: Path = ROOT) -> list[Path]:
    """The integration with Megatron, the way in of all hooks, the patcher with its recipes, and the launcher."""
    package = root / "megaresume"
    folders = (
        (package / "hosts" / "megatron", "*.py"),
        (package / "hosts", "importing.py"),
        (package / "hosts" / "startup", "*.py"),
        (root / "patches", "*.yaml"),
    )
    found = [path for folder, pattern in folders for path in folder.rglob(pattern)]
    return sorted([*found, package / "run.py"])


def fingerprint(root: Path = ROOT) -> str:
    """Sixteen hexadecimal digits of SHA-256 over recipes and definitions.

    Comments, docstrings and imports do not count, nor does the file in which a definition stands: moving code changes
    nothing that an upstream could notice, and the tests would. For the same reason our own dotted names are cut to
    their last word.
    """
    contents: list[str] = []
    for path in files(root):
        text = path.read_text(encoding="utf-8")
        contents += _statements(text) if path.suffix == ".py" else [f"{path.name}\n{text}"]
    return hashlib.sha256("\0".join(sorted(contents)).encode()).hexdigest()[:16]


@functools.cache
def _statements(text: str) -> list[str]:
    """The statements of a module as written, the same under every version of Python."""
    lines, module = text.splitlines(), ast.parse(text)
    for node in ast.walk(module):
        removed = [node] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            removed = [node.body[0]]
        for one in removed:
            lines[one.lineno - 1 : one.end_lineno] = [""] * len(lines[one.lineno - 1 : one.end_lineno])
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    found = []
    for node in module.body:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(one.lineno for one in decorators)])
        found.append("\n".join(line.rstrip() for line in lines[first - 1 : node.end_lineno] if line.strip()))
    return [_OWN_NAME.sub(r"\1", one) for one in found if one and not one.startswith("__all__")]


def commit() -> str:
    """The commit of this checkout, 10 hex digits; with a plus if files of the integration differ from it."""
    paths = [str(path) for path in files()]
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return "unknown"
    clean = subprocess.run(["git", "-C", str(ROOT), "diff", "--quiet", "HEAD", "--", *paths]).returncode == 0
    return head.stdout.strip()[:10] + ("" if clean else "+")
