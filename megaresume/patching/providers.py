"""Whether an expression is what a recipe expects in its place, above all: a datasets provider.

What the script shows (functions, lambdas, partials of them) is judged by the parameters that it needs; what it does
not show (imported names, attributes) by its name. What cannot be told is refused, with the reason.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import libcst as cst

from megaresume.patching.names import bound_value, bound_where, dotted, qualified

if TYPE_CHECKING:
    from megaresume.patching.recipe import Accepts
    from megaresume.patching.script import Script

__all__ = ["why_not"]


def why_not(script: Script, node: cst.BaseExpression, accepts: Accepts) -> str | None:
    """Why an expression cannot be told to be what is expected; None if it can."""
    if accepts.parameters is None and accepts.name is None:
        return None
    return _Judge(script, accepts).judge(node)


class _Judge:
    def __init__(self, script: Script, accepts: Accepts) -> None:
        self.script = script
        self.accepts = accepts
        self.seen: set[int] = set()

    def judge(self, node: cst.CSTNode) -> str | None:
        if id(node) in self.seen:
            return None
        self.seen.add(id(node))
        match node:
            case cst.Name(value="None"):
                return "it is None: this script gives Megatron no datasets"
            case cst.Name():
                return self._name(node)
            case cst.Attribute():
                return self._named(node.attr.value, node)
            case cst.Lambda():
                return self._count(_required(node.params), node)
            case cst.IfExp():
                return self.judge(node.body) or self.judge(node.orelse)
            case cst.Call():
                return self._call(node)
        return f"it is neither a function nor a name ({self.script.quote(node)})"

    def _name(self, node: cst.Name) -> str | None:
        where = bound_where(self.script, node)
        if not where:
            return self._named(node.value, node)
        reasons = (self._binding(binding, node.value) for binding in where)
        return next((reason for reason in reasons if reason is not None), None)

    def _binding(self, binding: cst.CSTNode, name: str) -> str | None:
        match binding:
            case cst.FunctionDef():
                return self._count(_required(binding.params), binding)
            case cst.ImportFrom() | cst.Import():
                # The name in the other module may tell where the one that it has here does not.
                reasons = [self._named(word, binding) for word in (name, *_original(binding, name))]
                return None if None in reasons else reasons[0]
            case cst.Param():
                return self._named(binding.name.value, binding)
            case cst.Name():
                assign = bound_value(self.script, binding)
                if assign is None or assign.value is None or _is_unpacking(assign):
                    return f"it is bound in a way that cannot be followed ({self.script.quote(binding)})"
                return self.judge(assign.value)
        return f"it is no function ({self.script.quote(binding)})"

    def _call(self, node: cst.Call) -> str | None:
        if _is_partial(self.script, node):
            return self._partial(node)
        first = node.args[0].value if node.args else None
        if first is not None and _Judge(self.script, self.accepts).judge(first) is None:
            return None  # a decorator: timed(provider)
        return (
            f"it is the result of {dotted(node.func)}(...), which this file does not show ({self.script.quote(node)})"
        )

    def _partial(self, node: cst.Call) -> str | None:
        names = _partial_required(self.script, node)
        if names is not None:
            return self._count(names, node)
        return self.judge(node.args[0].value) if node.args else "it is a partial of nothing"

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


def _original(binding: cst.Import | cst.ImportFrom, name: str) -> list[str]:
    """What an imported name is called in its own module."""
    if isinstance(binding.names, cst.ImportStar):
        return []
    return [dotted(alias.name) for alias in binding.names if alias.asname and dotted(alias.asname.name) == name]


def _required(parameters: cst.Parameters) -> list[str] | None:
    """The positional parameters without a default, ``self`` too; None if ``*args`` takes any number."""
    if isinstance(parameters.star_arg, cst.Param):
        return None
    both = (*parameters.posonly_params, *parameters.params)
    return [parameter.name.value for parameter in both if parameter.default is None]


def _is_partial(script: Script, node: cst.Call) -> bool:
    return bool(qualified(script, node.func) & {"functools.partial"})


def _partial_required(script: Script, node: cst.Call) -> list[str] | None:
    """What a partial of a function in this script still needs; None where it cannot be counted."""
    if not node.args or any(argument.star for argument in node.args):
        return None
    inner = node.args[0].value
    names: list[str] | None = None
    if isinstance(inner, cst.Lambda):
        names = _required(inner.params)
    elif isinstance(inner, cst.Call) and _is_partial(script, inner):
        names = _partial_required(script, inner)
    elif isinstance(inner, cst.Name):
        where = bound_where(script, inner)
        if len(where) == 1 and isinstance(where[0], cst.FunctionDef):
            names = _required(where[0].params)
    if names is None:
        return None
    given = [argument.keyword.value for argument in node.args[1:] if argument.keyword is not None]
    positional = len(node.args) - 1 - len(given)
    return [name for name in names[positional:] if name not in given]


def _is_unpacking(assign: cst.Assign | cst.AnnAssign | cst.NamedExpr) -> bool:
    return isinstance(assign, cst.Assign) and any(
        isinstance(target.target, cst.Tuple | cst.List) for target in assign.targets
    )
