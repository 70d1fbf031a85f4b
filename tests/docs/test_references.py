"""Docstrings, comments and documents name files and modules of this repository that exist.

megaresume.room.module.name   anywhere: the module exists, and has the name
`module.name`                 in the package, for a name that a module of ours defines: that module does
`room/file.py`, `room/folder` in backticks: the path exists, or is the end of one that does
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from megaresume.checkpoint.metrics.figures import FIGURES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megaresume"
FOLDERS = ("megaresume", "tests", "docs", "benchmarks", "launch")
ROOMS = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
DOTTED = re.compile(r"\bmegaresume(?:\.[A-Za-z_]\w*)+")
SHORT = re.compile(r"(?<!`)`([a-z_]+)\.([A-Za-z_]\w*)`(?!`)")
PATH = re.compile(rf"`([\w./-]+/[\w.-]+\.(?:py|md|sh)|(?:(?:megaresume/)?(?:{'|'.join(ROOMS)})|tests)/[\w./-]+)`")
#: files of other projects, named with the function that was read there; and places to be filled in.
OF_OTHERS = re.compile(r"^(megatron|deepspeed|transformers|flavors|examples)/|NAME|^room/")


def texts() -> Iterator[tuple[str, str]]:
    """Every Python file and document, by path; the changelog tells of files that were."""
    found = [path for folder in FOLDERS for ending in ("py", "md") for path in (ROOT / folder).rglob(f"*.{ending}")]
    for path in sorted([*found, *ROOT.glob("*.md")]):
        if path.name != "CHANGELOG.md":
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def has_name(dotted: str) -> bool:
    """Whether ``megaresume.room.module.name`` is there; of what follows a name, nothing is asked."""
    place, rest = PACKAGE, dotted.split(".")[1:]
    while rest and (place / rest[0]).is_dir():
        place /= rest.pop(0)
    if rest and (place / f"{rest[0]}.py").is_file():
        place /= f"{rest.pop(0)}.py"
    if place.is_dir():
        place /= "__init__.py"
    return not rest or rest[0].startswith("__") or re.search(rf"\b{rest[0]}\b", place.read_text()) is not None


def definitions() -> dict[str, set[str]]:
    """Names that modules of ours define at their top level, and the modules that do."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.setdefault(node.name, set()).add(path.stem if path.stem != "__init__" else path.parent.name)
    return found


def test_dotted_names() -> None:
    figures = {figure.name for figure in FIGURES}
    wrong = [
        f"{path}: {name[0]}"
        for path, text in texts()
        for name in DOTTED.finditer(text)
        if name[0].split(".")[1] in ROOMS and name[0] not in figures and not has_name(name[0])
    ]
    assert wrong == []


def test_names_of_modules() -> None:
    defined = definitions()
    wrong = [
        f"{path}: {module}.{name}"
        for path, text in texts()
        if path.startswith("megaresume/")
        for module, name in SHORT.findall(text)
        if name in defined and module != "megaresume" and module not in defined[name]
    ]
    assert wrong == []


def test_paths() -> None:
    known = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    wrong = [
        f"{path}: {name}"
        for path, text in texts()
        for name in PATH.findall(text)
        if not OF_OTHERS.search(name)
        and not any(one.endswith("/" + name.removeprefix("./").rstrip("/")) for one in known)
    ]
    assert wrong == []
