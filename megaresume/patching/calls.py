"""The one call of a function, and its arguments by the names of the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import libcst as cst

from megaresume.patching.errors import PatchError
from megaresume.patching.names import Uses

if TYPE_CHECKING:
    from megaresume.patching.recipe import Called, Recipe
    from megaresume.patching.script import Script

__all__ = ["Bound", "bind", "refuse", "the_call"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """A call whose arguments have found their parameters."""

    call: cst.Call
    called: Called
    arguments: dict[str, cst.Arg]


def refuse(script: Script, recipe: Recipe, headline: str, *, found: str, expected: str, cause: str) -> PatchError:
    """The error that names the change to make by hand, and the launcher that needs none."""
    return PatchError(
        f"{script.name}: {headline}",
        found=found,
        expected=expected,
        cause=cause,
        action=f"change it by hand ({recipe.by_hand}), "
        f"or leave the script as it is: torchrun -m megaresume.run {script.name} ...",
    )


def the_call(script: Script, recipe: Recipe, called: Called, uses: Uses) -> cst.Call:
    """The only call of a function. Raises PatchError for several, or for uses that hide further ones."""
    if len(uses.calls) > 1:
        raise refuse(
            script,
            recipe,
            f"{called.name} is called {len(uses.calls)} times",
            found=_lines(script, uses.calls),
            expected=f"one call of {called.name}",
            cause="a script that trains in several ways; which of them is meant cannot be told",
        )
    if uses.unclear:
        raise refuse(
            script,
            recipe,
            f"which function {called.name} is cannot be told",
            found=_lines(script, uses.unclear),
            expected=f"{called.name} imported from {' or '.join(called.modules)}, and called",
            cause="it is bound again, defined here, or handed on to something else",
        )
    return uses.calls[0]


def bind(script: Script, recipe: Recipe, called: Called, call: cst.Call) -> Bound | str:
    """Give every argument its parameter; a text says why the call does not have this shape.

    Raises:
        PatchError: ``*`` or ``**`` hide the arguments.
    """
    arguments: dict[str, cst.Arg] = {}
    for index, argument in enumerate(call.args):
        if argument.star:
            raise refuse(
                script,
                recipe,
                f"the arguments of {called.name} cannot be seen",
                found=script.quote(argument),
                expected="arguments written out",
                cause=f"{argument.star} unpacks what the file does not show",
            )
        if argument.keyword is not None:
            arguments[argument.keyword.value] = argument
        elif index < len(called.parameters):
            arguments[called.parameters[index]] = argument
        else:
            return f"{called.name} has {index + 1} positional arguments, at most {len(called.parameters)} are known"
    return Bound(call=call, called=called, arguments=arguments)


def _lines(script: Script, nodes: tuple[cst.CSTNode, ...]) -> str:
    return "; ".join(dict.fromkeys(script.quote(node) for node in nodes))
