"""The megatron package next to a script: its version, and the parameters that its functions really have.

Files are read, never imported. A script that is patched away from its Megatron is judged by its own content alone.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from megaresume.patching.recipe import Called, Recipe
from megaresume.patching.versions import contains

__all__ = ["Beside", "find_beside"]

#: how far up from the script the package is looked for: examples/multimodal/train.py is two folders below it.
MAX_LEVELS = 4

_NUMBER = re.compile(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """A folder that holds ``megatron``."""

    root: Path
    #: of megatron.core; None where it has none.
    version: str | None

    def __str__(self) -> str:
        return f"megatron{' ' + self.version if self.version else ''} in {self.root}"

    def why_not(self, recipe: Recipe) -> str | None:
        """Why a recipe does not fit this Megatron: a function has its parameters in another order; None if it does."""
        for called in recipe.calls.values():
            found = self._signature(called)
            if found is None:
                continue
            file, parameters = found
            for name in _used(recipe, called):
                expected = called.parameters.index(name)
                if name not in parameters:
                    return f"{called.name} in {file} has no parameter {name}: {', '.join(parameters[:5])}, ..."
                if parameters.index(name) != expected:
                    return (
                        f"{called.name} in {file} has {name} as parameter {parameters.index(name) + 1}, "
                        f"the recipe expects it as parameter {expected + 1}"
                    )
        return None

    def note(self, recipe: Recipe) -> str | None:
        """What to tell the user where the version lies outside the recipe's range."""
        if self.version is None or contains(recipe.versions, self.version):
            return None
        return f"{self} is outside {recipe.versions}; the parameters agree"

    def _signature(self, called: Called) -> tuple[Path, list[str]] | None:
        for name in called.defined_in:
            file = self.root / name
            if file.is_file():
                parameters = _parameters(file, called.name)
                return None if parameters is None else (file, parameters)
        return None


def find_beside(script: Path) -> Beside | None:
    """The nearest folder at or above a script's that holds a megatron package; None if there is none."""
    folder = script.resolve().parent
    for root in (folder, *folder.parents[: MAX_LEVELS - 1]):
        if (root / "megatron").is_dir():
            return Beside(root=root, version=_version(root / "megatron" / "core" / "package_info.py"))
    return None


def _version(file: Path) -> str | None:
    try:
        numbers = dict(_NUMBER.findall(file.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return None
    return ".".join(numbers[key] for key in ("MAJOR", "MINOR", "PATCH")) if len(numbers) == 3 else None


def _parameters(file: Path, function: str) -> list[str] | None:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # newer syntax than this Python's: nothing can be said
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return None


def _used(recipe: Recipe, called: Called) -> list[str]:
    """The parameters whose places matter to a recipe."""
    edited = [wrap.parameter for wrap in recipe.wraps if wrap.call == called.name]
    return edited + [name for call, name in recipe.matches.arguments if call == called.name]
