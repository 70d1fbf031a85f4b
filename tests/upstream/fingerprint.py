"""Which integration a document was made with: a hash of the code that decides whether an upstream works."""

from __future__ import annotations

import ast
import hashlib
import io
import subprocess
import tokenize
from pathlib import Path

__all__ = ["ROOT", "commit", "files", "fingerprint"]

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

ROOT = Path(__file__).resolve().parents[2]


def files(root: Path = ROOT) -> list[Path]:
    """The integration with Megatron, the patcher with its recipes, and the launcher."""
    package = root / "megaresume"
    folders = (
        (package / "integrations" / "megatron", "*.py"),
        (package / "patching", "*.py"),
        (root / "patches", "*.yaml"),
    )
    found = [path for folder, pattern in folders for path in folder.rglob(pattern)]
    return sorted([*found, package / "run.py"])


def fingerprint(root: Path = ROOT) -> str:
    """Sixteen hexadecimal digits of SHA-256 over names and contents; without the comments and docstrings of Python."""
    digest = hashlib.sha256()
    for path in files(root):
        text = path.read_text(encoding="utf-8")
        content = _code(text) if path.suffix == ".py" else text
        digest.update(f"{path.relative_to(root)}\0{content}\0".encode())
    return digest.hexdigest()[:16]


def _code(text: str) -> str:
    """The lines that do something; the same under every version of Python."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            words = node.body[0]
            lines[words.lineno - 1 : words.end_lineno] = [""] * len(lines[words.lineno - 1 : words.end_lineno])
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def commit() -> str:
    """The commit of this checkout, 10 hex digits; with a plus if files of the integration differ from it."""
    paths = [str(path) for path in files()]
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return "unknown"
    clean = subprocess.run(["git", "-C", str(ROOT), "diff", "--quiet", "HEAD", "--", *paths]).returncode == 0
    return head.stdout.strip()[:10] + ("" if clean else "+")
