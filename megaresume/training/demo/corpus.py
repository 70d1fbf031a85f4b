"""Text that every Python installation has: its sources, the docstrings in them, and its reference manual."""

from __future__ import annotations

import ast
import json
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["SOURCES", "write_texts"]

#: Source files and docstrings taken: enough for a good hundred steps, prepared in seconds.
NUM_FILES = 240
#: Articles of the manual longer than this are left out, so that the demo crosses an epoch of this source.
LONGEST_ARTICLE = 1800


def _files() -> list[Path]:
    """The first modules of the standard library, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idlelib", "turtledemo", "__pycache__"}
    files = [p for p in sorted(root.rglob("*.py")) if not skipped & set(p.relative_to(root).parts)]
    return [p for p in files if p.stat().st_size > 200][:NUM_FILES]


def _code() -> Iterator[str]:
    for path in _files():
        yield path.read_text(encoding="utf-8", errors="replace")


def _docstrings() -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for text in _code():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in the library's own sources
            try:
                tree = ast.parse(text)
            except (SyntaxError, ValueError):
                continue
        for node in ast.walk(tree):
            doc = ast.get_docstring(node) if isinstance(node, kinds) else None
            if doc:
                yield doc


def _manual() -> Iterator[str]:
    from pydoc_data.topics import topics

    for _, article in sorted(topics.items()):
        if len(article) <= LONGEST_ARTICLE:
            yield article


#: name -> (texts, weight).
SOURCES: dict[str, tuple[Callable[[], Iterator[str]], str]] = {
    "code": (_code, "0.5"),
    "docstrings": (_docstrings, "0.3"),
    "manual": (_manual, "0.2"),
}


def write_texts(directory: Path) -> dict[str, Path]:
    """Write each source as JSON lines; name -> file."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, (texts, _) in SOURCES.items():
        paths[name] = directory / f"{name}.jsonl"
        with open(paths[name], "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts())
    return paths
