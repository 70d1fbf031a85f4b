"""A script as a concrete syntax tree: what its names mean, and where a function that it imports is called.

Names are resolved through scopes: aliases (``from m import pretrain as run``), attributes (``training.pretrain``),
imports inside functions. A name counts only if all its bindings agree: Python uses the binding that runs last, and a
file does not always show which one that is.

`Judge` tells whether an expression is a datasets provider, a function that needs one argument. What the script shows
(functions, lambdas, partials of them) is judged by the parameters it needs; what it does not show (imported names,
attributes), by name. Anything that cannot be decided is refused, with the reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import libcst as cst
from libcst import matchers as m
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    Assignment,
    ExpressionContext,
    ExpressionContextProvider,
    ImportAssignment,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameSource,
    ScopeProvider,
)

from megaresume.hosts.megatron.patching import PatchError
from megaresume.stream.errors import UsageError

if TYPE_CHECKING:
    from megaresume.hosts.megatron.patching.recipe import Called


def dotted(node: cst.CSTNode | None) -> str:
    """``a.b.c`` for nested attributes; empty for anything else."""
    return "" if node is None else get_full_name_for_node(node) or ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Uses:
    """The places where a script uses a function that it imports, in textual order."""

    calls: Sequence[cst.Call]
    #: Passed to something else, so there may be other calls.
    handed_on: Sequence[cst.CSTNode]
    #: All bindings of its name, if one of them is not the function.
    rebound: Sequence[cst.CSTNode]


class Script:
    """A parsed script.

    Args:
        data: the file's bytes.
        name: its name in messages.

    Raises:
        UsageError: it is not Python (gives the line).
        PatchError: it is Python, but does not survive parsing byte for byte.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self.name = name
        self.module = _parse(data, name)
        self.wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        providers = (ParentNodeProvider, PositionProvider, ScopeProvider, ExpressionContextProvider)
        found: Mapping[Any, Mapping[cst.CSTNode, Any]] = self.wrapper.resolve_many(providers)
        self.parents, self._positions, self._scopes, self._contexts = (found[provider] for provider in providers)
        imports = [node for node in self.parents if isinstance(node, cst.Import | cst.ImportFrom)]
        #: All imports at any level, in textual order.
        self.imports = sorted(imports, key=self.line)

    def line(self, node: cst.CSTNode) -> int:
        """The line, from 1, where a node begins."""
        return int(self._positions[node].start.line)

    def source(self, node: cst.CSTNode) -> str:
        """A node's source text."""
        return self.module.code_for_node(node)

    def quote(self, *nodes: cst.CSTNode) -> str:
        """``line N: its text`` for each node, for messages."""
        lines = self.module.code.encode().splitlines()
        numbers = dict.fromkeys(self.line(node) for node in nodes)
        return "; ".join(f"line {number}: {lines[number - 1].decode().strip()[:160]}" for number in numbers)

    # -- names

    def imported(self) -> frozenset[str]:
        """Every dotted name that the script imports, at any level, or reads from its imports."""
        names = (name for node in self.imports for name in imports_of(node))
        return frozenset(names).union(*(meaning for _, meaning in self._meanings))

    def meaning(self, node: cst.CSTNode) -> frozenset[str]:
        """The dotted names that an expression may mean according to the script's imports; empty if none."""
        scope = self._scopes.get(node)
        found = () if scope is None else scope.get_qualified_names_for(node)
        return frozenset(name.name for name in found if name.source is QualifiedNameSource.IMPORT)

    def bindings(self, place: cst.CSTNode, name: str) -> list[cst.CSTNode]:
        """The nodes that bind a name used at a place: a FunctionDef, ClassDef, Param, Import, ImportFrom or Name."""
        return [one.node for one in self._assignments(place, name)]

    def _assignments(self, place: cst.CSTNode, name: str) -> list[Assignment | ImportAssignment]:
        scope = self._scopes.get(place)
        found = () if scope is None else scope[name]
        own = [one for one in found if isinstance(one, Assignment | ImportAssignment)]
        return sorted(own, key=lambda one: self.line(one.node))

    def assignment(self, name: cst.CSTNode) -> cst.Assign | cst.AnnAssign | cst.NamedExpr | None:
        """The plain assignment that a bound Name belongs to; None for a loop, a ``with``, and the like."""
        current = self.parents.get(name)
        while isinstance(current, cst.Tuple | cst.List | cst.Element | cst.AssignTarget):
            current = self.parents.get(current)
        return current if isinstance(current, cst.Assign | cst.AnnAssign | cst.NamedExpr) else None

    def reads(self, wanted: Collection[str]) -> list[cst.CSTNode]:
        """Expressions that may mean one of these dotted names, whether read or assigned to as an attribute."""
        return [node for node, names in self._meanings if not names.isdisjoint(wanted)]

    @cached_property
    def _meanings(self) -> list[tuple[cst.CSTNode, frozenset[str]]]:
        """Every name that is read or bound, except those in imports, and what it means."""
        found = [node for node, context in self._contexts.items() if context is not None and node in self._scopes]
        return [(node, self.meaning(node)) for node in sorted(found, key=self.line)]

    def uses(self, function: str, called: Called) -> Uses:
        """All uses of a function imported from one of the modules of ``called``."""
        wanted = {f"{module}.{function}" for module in called.modules}
        calls: list[cst.Call] = []
        handed_on: list[cst.CSTNode] = []
        rebound: list[cst.CSTNode] = []
        for node in self.reads(wanted) + self._starred(function, called.modules):
            parent = self.parents[node]
            if self._contexts[node] is not ExpressionContext.LOAD:
                rebound.append(node)
            elif isinstance(parent, cst.Call) and parent.func is node:
                calls.append(parent)
                rebound += self._disagreement(node, wanted, called)
            elif not isinstance(parent, cst.Attribute) and not self._is_wrapped(parent, called):
                handed_on.append(node)
        return Uses(calls=calls, handed_on=handed_on, rebound=sorted(rebound, key=self.line))

    def _starred(self, function: str, modules: Collection[str]) -> list[cst.CSTNode]:
        """Reads of a name that only ``from m import *`` can have provided."""
        if not any(dotted(star.module) in modules for star in self._stars()):
            return []
        reads = [node for node, _ in self._meanings if isinstance(node, cst.Name) and node.value == function]
        return [node for node in reads if not self.bindings(node, function)]

    def _stars(self) -> list[cst.ImportFrom]:
        return [one for one in self.imports if isinstance(one.names, cst.ImportStar)]

    def _disagreement(self, func: cst.CSTNode, wanted: set[str], called: Called) -> list[cst.CSTNode]:
        """All bindings of a called name, and later star imports, if any of them may be a function not wanted."""
        name = dotted(func)
        root = name.partition(".")[0]
        found = self._assignments(func, root)
        bindings = [one.node for one in found]
        first = self.line(bindings[0]) if bindings else 0
        stars = [
            star for star in self._stars() if self.line(star) > first and dotted(star.module) not in called.modules
        ]
        agree = (
            {meant.name for meant in one.get_qualified_names_for(name)} <= wanted
            or self._wraps(self.assignment(one.node), root, called)
            for one in found
        )
        return [] if all(agree) and not stars else [*bindings, *stars]

    def _is_wrapped(self, parent: cst.CSTNode, called: Called) -> bool:
        """Whether an argument is the one in ``f = wrapper(f)``."""
        call = self.parents.get(parent) if isinstance(parent, cst.Arg) else None
        assign = self.parents.get(call) if isinstance(call, cst.Call) else None
        return self._wraps(assign, self.source(parent), called)

    def _wraps(self, assign: cst.CSTNode | None, name: str, called: Called) -> bool:
        """Whether this is ``f, … = wrapper(f, …)`` with a wrapper that keeps the parameters."""
        target = m.Name(name)
        first = target | m.Tuple(elements=[m.Element(target), m.ZeroOrMore()])
        call = m.Call(args=[m.Arg(target, keyword=None), m.ZeroOrMore()])
        shape = m.Assign(targets=[m.AssignTarget(first)], value=call)
        return m.matches(assign, shape) and bool(self.meaning(assign.value.func) & {*called.wrappers})  # type: ignore[union-attr, arg-type]


def imports_of(node: cst.Import | cst.ImportFrom) -> Iterator[str]:
    """The dotted names that a statement imports: for ``from a.b import c``, ``a.b`` and ``a.b.c``."""
    prefix = ""
    if isinstance(node, cst.ImportFrom):
        module = "." * len(node.relative) + dotted(node.module)
        yield module
        prefix = f"{module}."
    if not isinstance(node.names, cst.ImportStar):
        yield from (prefix + dotted(alias.name) for alias in node.names)


def _parse(data: bytes, name: str) -> cst.Module:
    try:
        ast.parse(data)  # for Python's own error text, which users know
        module = cst.parse_module(data)
    except (SyntaxError, ValueError, cst.ParserSyntaxError) as error:
        line = int(getattr(error, "lineno", None) or getattr(error, "raw_line", None) or 0)
        shown = b"".join(data.splitlines()[line - 1 : line]).decode("utf-8", "replace").strip()[:160] if line else ""
        words = getattr(error, "msg", None) or getattr(error, "message", None) or str(error)
        raise UsageError(
            f"{name} is not a Python script" + (f": syntax error in line {line}" if line else ""),
            found=": ".join(filter(None, (shown, words))),
            expected="a script that Python can run, in UTF-8 or in the encoding that its first line declares",
            action=f"python -m py_compile {name}",
        ) from error
    if module.bytes != data:
        raise PatchError(
            f"{name} cannot be changed without changing other bytes of it",
            found="line ends or characters that do not survive parsing",
            expected="lines that end in \\n or \\r\\n",
            cause="line ends of old Macintosh files (a lone \\r)",
            action=f"convert its line ends, or use the launcher: torchrun -m megaresume.run {name} ...",
        )
    return module


#: Names of the parameters still needed (None: unknown, judged by name), and the node that shows it.
_Needed = tuple[list[str] | None, cst.CSTNode]


class _Unclear(Exception):
    """It cannot be decided whether an expression is a provider; gives the reason in words."""


class Judge:
    """Decides whether an expression is a provider, and if not, why.

    Args:
        script: the script that contains it.
        named: a regular expression for names of providers whose definition the script does not show.
    """

    def __init__(self, script: Script, named: str) -> None:
        self.script = script
        self.named = named
        self._seen: set[int] = set()

    def why_not(self, node: cst.CSTNode) -> str | None:
        """Why it is not a provider, with the line that shows it; None if it is one."""
        try:
            for names, shown in self._needs(node):
                if names is not None and len(names) != 1:
                    count = f"{len(names)} arguments ({', '.join(names)})" if names else "no argument"
                    return f"it needs {count}, not 1 ({self.script.quote(shown)})"
        except _Unclear as reason:
            return str(reason)
        return None

    def _needs(self, node: cst.CSTNode) -> Iterator[_Needed]:
        """What is still needed by everything that an expression may be."""
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
                # The name in the other module may be telling even if the alias here is not.
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
    """The arguments still needed after a partial; all of them if it unpacks something."""
    if names is None or any(argument.star for argument in given):
        return names
    keywords = {argument.keyword.value for argument in given if argument.keyword is not None}
    return [name for name in names[len(given) - len(keywords) :] if name not in keywords]


def _required(parameters: cst.Parameters) -> list[str] | None:
    if isinstance(parameters.star_arg, cst.Param):
        return None
    both = (*parameters.posonly_params, *parameters.params)
    return [parameter.name.value for parameter in both if parameter.default is None]
