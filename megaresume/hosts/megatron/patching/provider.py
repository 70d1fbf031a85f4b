"""Whether an expression is a datasets provider: a function that needs one argument.

What the script shows (functions, lambdas, partials of them) is judged by the parameters that it needs; what it does
not show (imported names, attributes) by its name. What cannot be told is refused, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import libcst as cst

from megaresume.hosts.megatron.patching.script import dotted

if TYPE_CHECKING:
    from megaresume.hosts.megatron.patching.script import Script

#: names of the parameters that something still needs (None if not known, its name tells), and what shows it.
_Needed = tuple[list[str] | None, cst.CSTNode]


class _Unclear(Exception):
    """What an expression is cannot be told; the reason in words."""


class Judge:
    """Why an expression cannot be told to be a provider; None if it can.

    Args:
        script: that it stands in.
        named: a regular expression for the names of providers that the script does not show.
    """

    def __init__(self, script: Script, named: str) -> None:
        self.script = script
        self.named = named
        self._seen: set[int] = set()

    def why_not(self, node: cst.CSTNode) -> str | None:
        """The reason, in words, with the line that shows it."""
        try:
            for names, shown in self._needs(node):
                if names is not None and len(names) != 1:
                    count = f"{len(names)} arguments ({', '.join(names)})" if names else "no argument"
                    return f"it needs {count}, not 1 ({self.script.quote(shown)})"
        except _Unclear as reason:
            return str(reason)
        return None

    def _needs(self, node: cst.CSTNode) -> Iterator[_Needed]:
        """Of everything that an expression may be."""
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        match node:
            case cst.Name(value="None"):
                raise _Unclear("it is None: this script gives Megatron no datasets")
            case cst.Name(value=name):
                bindings = self.script.bindings(node, name)
                for binding in bindings:
                    yield from self._bound(binding, name)
                if not bindings:
                    yield self._named(node, name)
            case cst.Attribute():
                yield self._named(node, node.attr.value)
            case cst.Lambda():
                yield _required(node.params), node
            case cst.IfExp():
                yield from self._needs(node.body)
                yield from self._needs(node.orelse)
            case cst.Call(args=[first, *given]) if "functools.partial" in self.script.meaning(node.func):
                for names, _ in self._needs(first.value):
                    yield _without(names, given), node
            case cst.Call(args=[first, *_]) if self.why_not(first.value) is None:
                return  # a decorator: timed(provider)
            case cst.Call():
                words = f"it is the result of {dotted(node.func)}(...), which this file does not show"
                raise _Unclear(f"{words} ({self.script.quote(node)})")
            case _:
                raise _Unclear(f"it is neither a function nor a name ({self.script.quote(node)})")

    def _bound(self, binding: cst.CSTNode, name: str) -> Iterator[_Needed]:
        match binding:
            case cst.FunctionDef():
                yield _required(binding.params), binding
            case cst.ImportFrom(names=[*aliases]) | cst.Import(names=[*aliases]):
                # The name in the other module may tell where the one that it has here does not.
                own = [dotted(one.name) for one in aliases if one.asname and dotted(one.asname.name) == name]
                yield self._named(binding, name, *own)
            case cst.Param():
                yield self._named(binding, name)
            case cst.Name():
                assign = self.script.assignment(binding)
                unpacks = isinstance(assign, cst.Assign) and any(
                    isinstance(one.target, cst.Tuple | cst.List) for one in assign.targets
                )
                if assign is None or assign.value is None or unpacks:
                    raise _Unclear(f"it is bound in a way that cannot be followed ({self.script.quote(binding)})")
                yield from self._needs(assign.value)
            case _:
                raise _Unclear(f"it is not a function ({self.script.quote(binding)})")

    def _named(self, node: cst.CSTNode, *names: str) -> _Needed:
        if not any(re.search(self.named, name) for name in names):
            raise _Unclear(f"the name {names[0]} does not tell ({self.script.quote(node)})")
        return None, node


def _without(names: list[str] | None, given: Sequence[cst.Arg]) -> list[str] | None:
    """What is still needed after a partial; all of it where that unpacks something."""
    if names is None or any(argument.star for argument in given):
        return names
    keywords = {argument.keyword.value for argument in given if argument.keyword is not None}
    return [name for name in names[len(given) - len(keywords) :] if name not in keywords]


def _required(parameters: cst.Parameters) -> list[str] | None:
    if isinstance(parameters.star_arg, cst.Param):
        return None
    both = (*parameters.posonly_params, *parameters.params)
    return [parameter.name.value for parameter in both if parameter.default is None]
