"""The one recipe that fits a script, by the script's content and the megatron package beside it. Never by file name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import libcst as cst

from megaresume.patching.calls import Bound, bind, the_call
from megaresume.patching.errors import PatchError
from megaresume.patching.names import Uses, imported_names, is_read, qualified, uses

if TYPE_CHECKING:
    from megaresume.patching.beside import Beside
    from megaresume.patching.recipe import Recipe
    from megaresume.patching.script import Script

__all__ = ["Fit", "choose"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A recipe that fits, and the calls that it edits."""

    recipe: Recipe
    bound: dict[str, Bound]


def choose(script: Script, recipes: Sequence[Recipe], beside: Beside | None) -> Fit:
    """The recipe for a script.

    Raises:
        PatchError: none fits, with the reason for each; several fit; or the script cannot be changed safely.
    """
    _refuse_own_changes(script, recipes)
    imported = imported_names(script)
    fits: list[Fit] = []
    refusals: list[PatchError] = []
    reasons: list[tuple[Recipe, str]] = []
    foreign: list[tuple[Recipe, str]] = []
    for recipe in recipes:
        if (reason := _imports(recipe, imported)) is not None:
            foreign.append((recipe, reason))
            continue
        try:
            found = _fit(script, recipe, beside)
        except PatchError as error:
            refusals.append(error)
            continue
        if isinstance(found, Fit):
            fits.append(found)
        else:
            reasons.append((recipe, found))
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise _ambiguous(script, [fit.recipe for fit in fits])
    if refusals:
        raise refusals[0]
    # The recipes that came furthest say most.
    raise _none(script, reasons or foreign)


def _fit(script: Script, recipe: Recipe, beside: Beside | None) -> Fit | str:
    found = {name: uses(script, name, called.modules) for name, called in recipe.calls.items()}
    for name in recipe.matches.calls_none_of:
        if found[name].calls:
            return f"it calls {name} ({script.quote(found[name].calls[0])})"
    needed = dict.fromkeys((*recipe.matches.calls, *(wrap.call for wrap in recipe.wraps)))
    for name in needed:
        if not found[name].calls:
            return _no_call(script, recipe, name, found[name])
    if beside is not None and (reason := beside.why_not(recipe)) is not None:
        return reason
    bound: dict[str, Bound] = {}
    for name in needed:
        result = bind(script, recipe, recipe.calls[name], the_call(script, recipe, recipe.calls[name], found[name]))
        if isinstance(result, str):
            return result
        bound[name] = result
    return _arguments(script, recipe, bound) or Fit(recipe=recipe, bound=bound)


def _imports(recipe: Recipe, imported: frozenset[str]) -> str | None:
    def has(module: str) -> bool:
        return any(name == module or name.startswith(module + ".") for name in imported)

    matches = recipe.matches
    for module in matches.imports:
        if not has(module):
            return f"it does not import {module}"
    if matches.imports_any_of and not any(map(has, matches.imports_any_of)):
        return f"it imports none of {', '.join(matches.imports_any_of)}"
    for module in matches.imports_none_of:
        if has(module):
            return f"it imports {module}"
    return None


def _no_call(script: Script, recipe: Recipe, name: str, found: Uses) -> str:
    if found.unclear:
        return f"it calls no {name}, but hands it on ({script.quote(found.unclear[0])})"
    return f"it does not call {name} of {' or '.join(recipe.calls[name].modules)}"


def _arguments(script: Script, recipe: Recipe, bound: dict[str, Bound]) -> str | None:
    for (call, parameter), pattern in recipe.matches.arguments.items():
        argument = bound[call].arguments.get(parameter) if call in bound else None
        if argument is None:
            return f"its call of {call} has no {parameter}"
        if not re.search(pattern, script.source(argument.value)):
            return f"{parameter} of {call} would be {_short(script.source(argument.value))}, not {pattern}"
    return None


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 60 else words[:57] + "..."


def _refuse_own_changes(script: Script, recipes: Sequence[Recipe]) -> None:
    """A script that calls what a recipe would insert, without our marker, was changed by hand."""
    ours = {wrap.function for recipe in recipes for wrap in recipe.wraps}
    roots = {name.partition(".")[0] for name in ours}
    if not any(name.partition(".")[0] in roots for name in imported_names(script)):
        return
    for node in script.nodes:
        if isinstance(node, cst.Name | cst.Attribute) and is_read(script, node) and qualified(script, node) & ours:
            raise PatchError(
                f"{script.name} uses megaresume already",
                found=script.quote(node),
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


def _none(script: Script, reasons: list[tuple[Recipe, str]]) -> PatchError:
    lines = "\n".join(f"                {recipe.name}: {reason}" for recipe, reason in reasons)
    runs = [
        node
        for node in script.nodes
        if isinstance(node, cst.Call) and qualified(script, node.func) & {"runpy.run_path", "runpy.run_module"}
    ]
    if runs:
        action = f"patch the script that this one runs ({script.quote(runs[0])})"
    else:
        action = (
            f"use the launcher, which needs no recipe: torchrun -m megaresume.run {script.name} ...; "
            "or write a recipe (docs/patching.md)"
        )
    return PatchError(
        f"{script.name}: no recipe fits",
        found=f"\n{lines}",
        expected="a script that calls pretrain of Megatron-LM, Megatron-DeepSpeed, or a copy of them",
        cause="a script of another kind, or of a fork that is not known here",
        action=action,
    )
