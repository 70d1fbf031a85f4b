"""The demo of text: three corpora of this machine's Python, and a GPT.

The text is what every Python installation has: its sources, the docstrings in them, and its reference manual.
"""

from __future__ import annotations

import ast
import json
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from megaresume.cluster.demo.demo import GLOBAL_BATCH_SIZE, Demo, as_words, small_gpt, write_config
from megaresume.cluster.local import ask
from megaresume.cluster.scenario import Say

#: Source files and docstrings taken: enough for a good hundred steps, prepared in seconds.
NUM_FILES = 240
#: Articles of the manual longer than this are left out, so that the demo crosses an epoch of this source.
LONGEST_ARTICLE = 1800

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _files() -> list[Path]:
    """The first modules of the standard library, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "test", "tests", "idlelib", "turtledemo", "__pycache__"}
    files = [p for p in sorted(root.rglob("*.py")) if not skipped & set(p.relative_to(root).parts)]
    return [p for p in files if p.stat().st_size > 200][:NUM_FILES]


def _modules() -> Iterator[tuple[str, ast.Module]]:
    for path in _files():
        text = path.read_text(encoding="utf-8", errors="replace")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in the library's own sources
            try:
                yield text, ast.parse(text)
            except (SyntaxError, ValueError):
                continue


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods, and their source: whole modules would fill a hundred samples each."""
    for text, module in _modules():
        lines = text.splitlines(keepends=True)
        for node in module.body:
            for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
                if isinstance(inner, _FUNCTIONS):
                    yield textwrap.dedent("".join(lines[inner.lineno - 1 : inner.end_lineno])), inner


def _code() -> Iterator[str]:
    return (source for source, _ in functions())


def _docstrings() -> Iterator[str]:
    for _, module in _modules():
        for node in ast.walk(module):
            doc = ast.get_docstring(node) if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) else None
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


def _prepare(out: Path, say: Say) -> Path:
    """Build the corpora with ``megaresume prepare``."""
    for name, path in write_texts(out / "texts").items():
        summary = ask("prepare", str(path), "--output", str(out / "corpora" / name))
        say(f"   {name}: {summary['documents']:,} documents, {summary['tokens']:,} tokens")
    sources = {name: {"path": f"corpora/{name}", "weight": float(weight)} for name, (_, weight) in SOURCES.items()}
    return write_config(out / "data.yaml", sources)


def _flags(out: Path, steps: int) -> list[str]:
    return as_words(small_gpt(steps) | {"global-batch-size": GLOBAL_BATCH_SIZE, "save-interval": 8})


TEXT = Demo(
    title="megaresume demo",
    steps=100,
    data="three corpora from the texts of this machine's Python",
    content="tokens, labels, masks and positions",
    packing="Only documents longer than a sample were cut.",
    prepare=_prepare,
    flags=_flags,
)
