"""Chooses the one recipe that fits a script, by what it imports and calls, and the megatron package beside it.

Never by its file name, nor just because nothing speaks against a recipe. Files beside the script are read, not
imported; a script that is patched away from its Megatron is judged by its own content alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst import matchers as m
from packaging.specifiers import SpecifierSet

from megaresume.hosts.megatron.patching import PatchError
from megaresume.hosts.megatron.patching.recipe import FLAGS, PROVIDER, Called, Recipe
from megaresume.hosts.megatron.patching.script import Script, Uses

#: How far up from the script to look for the package: examples/multimodal/train.py is two folders below it.
MAX_LEVELS = 4

_NUMBER = re.compile(r"^(?:MAJOR|MINOR|PATCH)\s*=\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """A folder that contains ``megatron``."""

    root: Path
    #: Version of megatron.core; None if it has none.
    version: str | None

    def __str__(self) -> str:
        return f"megatron{' ' + self.version if self.version else ''} in {self.root}"

    def why_not(self, recipe: Recipe) -> str | None:
        """Why a recipe does not fit this Megatron: too old, or a function has other parameters. None if it fits."""
        for one in SpecifierSet(recipe.versions):
            if self.version is not None and one.operator in (">", ">=") and not one.contains(self.version):
                return f"{self} is older than {one.version}"
        used = [(one.of, one.parameter) for one in (recipe.provider, recipe.flags)]
        used += [(recipe.provider.of, parameter) for parameter in recipe.matches.arguments]
        for name, parameter in used:
            file = self.definition(recipe.calls[name])
            there = None if file is None else _parameters(file, name)
            if there is None:
                continue
            if parameter not in there:
                return f"{name} in {file} has no parameter {parameter}: {', '.join(there[:5])}, ..."
            place, expected = there.index(parameter) + 1, recipe.calls[name].parameters.index(parameter) + 1
            if place != expected:
                return (
                    f"{name} in {file} has {parameter} as parameter {place}, "
                    f"the recipe expects it as parameter {expected}"
                )
        return None

    def note(self, recipe: Recipe) -> str | None:
        """The note for the user if the version is outside the recipe's range."""
        if self.version is None or SpecifierSet(recipe.versions).contains(self.version):
            return None
        return f"{self} is outside {recipe.versions}; the parameters agree"

    def definition(self, called: Called) -> Path | None:
        """The file that defines a function."""
        return next((self.root / name for name in called.defined_in if (self.root / name).is_file()), None)


def find_beside(script: Path) -> Beside | None:
    """The nearest folder at or above the script's that has a megatron package; None if there is none."""
    for root in script.resolve().parents[:MAX_LEVELS]:
        if (root / "megatron").is_dir():
            info = root / "megatron" / "core" / "package_info.py"
            numbers = _NUMBER.findall(info.read_text(encoding="utf-8", errors="replace")) if info.is_file() else []
            return Beside(root=root, version=".".join(numbers) if len(numbers) == 3 else None)
    return None


def _tree(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])  # syntax newer than this Python's: cannot be judged


def _parameters(file: Path, function: str) -> list[str] | None:
    for node in _tree(file).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return None


def _imported_by(file: Path) -> Iterator[str]:
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A recipe that fits: for each function, its call and the arguments by parameter name."""

    recipe: Recipe
    calls: dict[str, cst.Call]
    arguments: dict[str, dict[str, cst.Arg]]


def choose(script: Script, recipes: Sequence[Recipe], beside: Beside | None) -> Fit:
    """Choose the recipe for a script.

    Raises:
        PatchError: none fits (gives the reason for each); several fit; or the script cannot be changed safely.
    """
    _refuse_own_changes(script)
    fits: list[Fit] = []
    refusals: list[PatchError] = []
    reasons: dict[str, str] = {}
    for recipe in recipes:
        try:
            found = _fit(script, recipe, beside)
        except PatchError as error:
            refusals.append(error)
            continue
        if isinstance(found, Fit):
            fits.append(found)
        else:
            reasons[recipe.name] = found
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise _ambiguous(script, [fit.recipe for fit in fits])
    raise refusals[0] if refusals else _none(script, reasons)


def _fit(script: Script, recipe: Recipe, beside: Beside | None) -> Fit | str:
    """The fit, or why not. Raises PatchError if it is the right recipe but the script cannot be changed."""
    matches, imported = recipe.matches, script.imported()
    if matches.imports_any_of and not any(_has(imported, module) for module in matches.imports_any_of):
        return f"it imports none of {', '.join(matches.imports_any_of)}"
    for module in matches.imports_none_of:
        if _has(imported, module):
            return f"it imports {module}"
    files = [] if beside is None else [file for one in recipe.calls.values() if (file := beside.definition(one))]
    beside_it = frozenset(name for file in files for name in _imported_by(file))
    for module in matches.uses:
        if not _has(imported | beside_it, module):
            return f"{module} is imported neither by it nor by {files[0] if files else 'a megatron beside it'}"
    found = {name: script.uses(name, recipe.calls[name]) for name in (recipe.provider.of, recipe.flags.of)}
    for name, uses in found.items():
        if not uses.calls and uses.handed_on:
            return f"it calls no {name}, but passes it on ({script.quote(uses.handed_on[0])})"
        if not uses.calls:
            return f"it does not call {name} of {' or '.join(recipe.calls[name].modules)}"
    if beside is not None and (reason := beside.why_not(recipe)) is not None:
        return reason
    calls = {name: _single_call(script, recipe, name, uses) for name, uses in found.items()}
    arguments = {}
    for name, call in calls.items():
        known = len(recipe.calls[name].parameters)
        arguments[name] = _bind(script, recipe, name, call)
        if len(arguments[name]) < len(call.args):
            count = sum(argument.keyword is None for argument in call.args)
            return f"{name} has {count} positional arguments, at most {known} are known"
    name = recipe.provider.of
    for parameter, pattern in matches.arguments.items():
        argument = arguments[name].get(parameter)
        if argument is None:
            return f"its call of {name} has no {parameter}"
        source = " ".join(script.source(argument.value).split())
        if not re.search(pattern, source):
            return f"{parameter} of {name} would be {source[:60]}, not {pattern}"
    return Fit(recipe=recipe, calls=calls, arguments=arguments)


def _has(imported: frozenset[str], module: str) -> bool:
    return any(name == module or name.startswith(module + ".") for name in imported)


def _single_call(script: Script, recipe: Recipe, name: str, uses: Uses) -> cst.Call:
    """The only call of a function. Raises PatchError for several, or for uses that may hide other calls."""
    modules = " or ".join(recipe.calls[name].modules)
    if len(uses.calls) > 1:
        raise refusal(
            script,
            recipe,
            f"{name} is called {len(uses.calls)} times",
            found=script.quote(*uses.calls),
            expected=f"one call of {name}",
            cause="a script that trains in several ways; it is not clear which one is meant",
        )
    if uses.rebound or uses.handed_on:
        raise refusal(
            script,
            recipe,
            f"which function {name} is cannot be told",
            found=script.quote(*(uses.rebound or uses.handed_on)),
            expected=f"{name} bound by its import from {modules} alone, and called",
            cause="the name is bound more than once: Python calls what was bound last, which may take other arguments"
            if uses.rebound
            else "it is passed to something else, which may call it with other arguments",
        )
    return uses.calls[0]


def _bind(script: Script, recipe: Recipe, name: str, call: cst.Call) -> dict[str, cst.Arg]:
    """The arguments by parameter name, except positional ones beyond the known parameters."""
    for argument in call.args:
        if argument.star:
            raise refusal(
                script,
                recipe,
                f"the arguments of {name} cannot be seen",
                found=script.quote(argument),
                expected="arguments written out",
                cause=f"{argument.star} unpacks what the file does not show",
            )
    bound = dict(zip(recipe.calls[name].parameters, (one for one in call.args if one.keyword is None), strict=False))
    return bound | {one.keyword.value: one for one in call.args if one.keyword is not None}


def refusal(script: Script, recipe: Recipe, headline: str, *, found: str, expected: str, cause: str) -> PatchError:
    """The error that names the change to make by hand, and the launcher that needs none."""
    return PatchError(
        f"{script.name}: {headline}",
        found=found,
        expected=expected,
        cause=cause,
        action=f"change it by hand ({recipe.by_hand}); leave the script as it is: torchrun -m megaresume.run "
        f"{script.name} ...; or, if the function is one of another module, write a recipe (docs/megatron-launcher.md)",
    )


def _refuse_own_changes(script: Script) -> None:
    """Refuse a script that calls what a recipe would insert but lacks our marker: it was changed by hand."""
    found = script.reads({PROVIDER, FLAGS})
    if found:
        raise PatchError(
            f"{script.name} uses megaresume already",
            found=script.quote(found[0]),
            expected="a script that does not",
            cause="it was changed by hand, or the marker of a patch was deleted",
            action="leave it as it is; or take these changes out, and patch it then",
        )


def _ambiguous(script: Script, recipes: list[Recipe]) -> PatchError:
    lines = "\n".join(
        f"                  --recipe {recipe.name}  ({recipe.upstream} {recipe.versions})" for recipe in recipes
    )
    return PatchError(
        f"{script.name}: {len(recipes)} recipes fit",
        found=", ".join(recipe.name for recipe in recipes),
        expected="one",
        cause="arguments given by keyword look the same in several versions, and no megatron package is beside it",
        action=f"name the one for your Megatron:\n{lines}",
    )


def _none(script: Script, reasons: dict[str, str]) -> PatchError:
    runs = m.findall(script.module, m.Call(func=m.Attribute(m.Name("runpy"))))
    if runs:
        action = f"patch the script that this one runs ({script.quote(runs[0])})"
    else:
        action = (
            "if its Megatron is one of docs/tried.md, use the launcher, which needs no recipe: "
            f"torchrun -m megaresume.run {script.name} ...; else write a recipe (docs/megatron-launcher.md)"
        )
    return PatchError(
        f"{script.name}: no recipe fits",
        found="\n" + "\n".join(f"                {name}: {reason}" for name, reason in reasons.items()),
        expected="a script that calls pretrain of Megatron-LM from core 0.8 on, Megatron-DeepSpeed, or a copy of them",
        cause="a script of another kind, or of a fork or version that is not known here",
        action=action,
    )
