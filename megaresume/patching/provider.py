"""Whether an expression is what a recipe expects in its place, above all: a datasets provider.

What the script shows (functions, lambdas, partials of them) is judged by the parameters that it needs; what it does
not show (imported names, attributes) by its name. What cannot be told is refused, with the reason.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import libcst as cst

from megaresume.patching.recipe import Accepts
from megaresume.patching.script import dotted

if TYPE_CHECKING:
    from megaresume.patching.script import Script


class Judge:
    """Why an expression cannot be told to be what is expected; None if it can."""

    def __init__(self, script: Script, accepts: Accepts) -> None:
        self.script = script
        self.accepts = accepts
        self.seen: set[int] = set()

    def why_not(self, node: cst.CSTNode) -> str | None:
        """The reason, in words, with the line that shows it."""
        if id(node) in self.seen or self.accepts == Accepts():
            return None
        self.seen.add(id(node))
        match node:
            case cst.Name(value="None"):
                return "it is None: this script gives Megatron no datasets"
            case cst.Name():
                bindings = self.script.bindings(node, node.value)
                reasons = [self._binding(one, node.value) for one in bindings] or [self._named(node.value, node)]
                return next(filter(None, reasons), None)
            case cst.Attribute():
                return self._named(node.attr.value, node)
            case cst.Lambda():
                return self._count(_required(node.params), node)
            case cst.IfExp():
                return self.why_not(node.body) or self.why_not(node.orelse)
            case cst.Call():
                return self._call(node)
        return f"it is neither a function nor a name ({self.script.quote(node)})"

    def _binding(self, binding: cst.CSTNode, name: str) -> str | None:
        match binding:
            case cst.FunctionDef():
                return self._count(_required(binding.params), binding)
            case cst.ImportFrom(names=[*aliases]) | cst.Import(names=[*aliases]):
                # The name in the other module may tell where the one that it has here does not.
                own = [dotted(one.name) for one in aliases if one.asname and dotted(one.asname.name) == name]
                reasons = [self._named(word, binding) for word in (name, *own)]
                return None if None in reasons else reasons[0]
            case cst.Param():
                return self._named(binding.name.value, binding)
            case cst.Name():
                assign = self.script.assignment(binding)
                unpacks = isinstance(assign, cst.Assign) and any(
                    isinstance(one.target, cst.Tuple | cst.List) for one in assign.targets
                )
                if assign is None or assign.value is None or unpacks:
                    return f"it is bound in a way that cannot be followed ({self.script.quote(binding)})"
                return self.why_not(assign.value)
        return f"it is no function ({self.script.quote(binding)})"

    def _call(self, node: cst.Call) -> str | None:
        first = node.args[0].value if node.args else None
        if first is not None and self._is_partial(node):
            needed = self._still_needed(node)
            return self.why_not(first) if needed is None else self._count(needed, node)
        if first is not None and Judge(self.script, self.accepts).why_not(first) is None:
            return None  # a decorator: timed(provider)
        quote = self.script.quote(node)
        return f"it is the result of {dotted(node.func)}(...), which this file does not show ({quote})"

    def _is_partial(self, node: cst.CSTNode) -> bool:
        return isinstance(node, cst.Call) and "functools.partial" in self.script.meaning(node.func)

    def _still_needed(self, node: cst.Call) -> list[str] | None:
        """What a partial of a function in this script still needs; None if it cannot be counted."""
        if any(argument.star for argument in node.args):
            return None
        inner, names = node.args[0].value, None
        if isinstance(inner, cst.Lambda):
            names = _required(inner.params)
        elif isinstance(inner, cst.Call) and inner.args and self._is_partial(inner):
            names = self._still_needed(inner)
        elif isinstance(inner, cst.Name):
            where = self.script.bindings(inner, inner.value)
            names = _required(where[0].params) if len(where) == 1 and isinstance(where[0], cst.FunctionDef) else None
        if names is None:
            return None
        given = [argument.keyword.value for argument in node.args[1:] if argument.keyword is not None]
        positional = len(node.args) - 1 - len(given)
        return [name for name in names[positional:] if name not in given]

    def _count(self, names: list[str] | None, node: cst.CSTNode) -> str | None:
        expected = self.accepts.parameters
        if expected is None or names is None or len(names) == expected:
            return None
        count = f"{len(names)} arguments ({', '.join(names)})" if names else "no argument"
        return f"it needs {count}, not {expected} ({self.script.quote(node)})"

    def _named(self, name: str, node: cst.CSTNode) -> str | None:
        if self.accepts.name is None or re.search(self.accepts.name, name):
            return None
        return f"the name {name} does not tell ({self.script.quote(node)})"


def _required(parameters: cst.Parameters) -> list[str] | None:
    """The positional parameters without a default, ``self`` too; None if ``*args`` takes any number."""
    if isinstance(parameters.star_arg, cst.Param):
        return None
    both = (*parameters.posonly_params, *parameters.params)
    return [parameter.name.value for parameter in both if parameter.default is None]
