"""What names in a script mean, and where functions that it imports are called.

Everything is resolved through scopes: aliases (``from m import pretrain as run``), attributes (``training.pretrain``),
imports inside functions, and names that are bound again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import libcst as cst
from libcst.metadata import Assignment, ImportAssignment, QualifiedNameSource, Scope

if TYPE_CHECKING:
    from megaresume.patching.script import Script

__all__ = [
    "Uses",
    "bindings_of",
    "bound_value",
    "bound_where",
    "dotted",
    "imported_names",
    "is_read",
    "qualified",
    "uses",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Uses:
    """Where a script uses an imported function."""

    #: calls of it, in the order of the text.
    calls: tuple[cst.Call, ...]
    #: assignments that bind its name again to a wrapper of it, as in-process restart does.
    rebindings: tuple[cst.Assign, ...]
    #: everything else: handed on, bound to something else, defined in the script. With it, calls cannot be told.
    unclear: tuple[cst.CSTNode, ...]


def scope_of(script: Script, node: cst.CSTNode) -> Scope | None:
    """The scope that a node's names are looked up in."""
    current: cst.CSTNode | None = node
    while current is not None:
        scope = script.scopes.get(current)
        if scope is not None:
            return scope
        current = script.parents.get(current)
    return None


def qualified(script: Script, node: cst.CSTNode) -> frozenset[str]:
    """The dotted names that an expression may mean by the script's imports; empty if it means none."""
    if not isinstance(node, cst.Name | cst.Attribute):
        return frozenset()
    scope = scope_of(script, node)
    if scope is None:
        return frozenset()
    found = scope.get_qualified_names_for(node)
    return frozenset(name.name for name in found if name.source is QualifiedNameSource.IMPORT)


def bindings_of(script: Script, place: cst.CSTNode, name: str) -> list[cst.CSTNode]:
    """What binds a name that is used at a place, in the order of the text.

    A FunctionDef, ClassDef, Param, Import, ImportFrom, or the Name that is assigned.
    """
    scope = scope_of(script, place)
    found = [] if scope is None else [item for item in scope[name] if isinstance(item, Assignment | ImportAssignment)]
    return sorted((item.node for item in found), key=script.start)


def bound_where(script: Script, name: cst.Name) -> list[cst.CSTNode]:
    """What binds a name that is read."""
    return bindings_of(script, name, name.value)


def bound_value(script: Script, name: cst.CSTNode) -> cst.Assign | cst.AnnAssign | cst.NamedExpr | None:
    """The plain assignment that a bound Name belongs to; None for a loop, a ``with``, and the like."""
    current = script.parents.get(name)
    while isinstance(current, cst.Tuple | cst.List | cst.Element | cst.AssignTarget):
        current = script.parents.get(current)
    return current if isinstance(current, cst.Assign | cst.AnnAssign | cst.NamedExpr) else None


def imported_names(script: Script) -> frozenset[str]:
    """Every dotted name that the script imports, at any place: ``from a.b import c`` gives ``a.b`` and ``a.b.c``."""
    names: set[str] = set()
    for node in script.nodes:
        if isinstance(node, cst.Import):
            names.update(dotted(alias.name) for alias in node.names)
        elif isinstance(node, cst.ImportFrom):
            names.update(_from_names(node))
    return frozenset(names)


def _from_names(node: cst.ImportFrom) -> Iterator[str]:
    module = "." * len(node.relative) + (dotted(node.module) if node.module is not None else "")
    yield module
    if not isinstance(node.names, cst.ImportStar):
        yield from (f"{module}.{dotted(alias.name)}" for alias in node.names)


def dotted(node: cst.BaseExpression) -> str:
    """``a.b.c`` of nested attributes; the last part alone where the root is something else."""
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else "?"


def uses(script: Script, function: str, modules: Collection[str]) -> Uses:
    """All uses of a function that the script imports from one of some modules."""
    wanted = frozenset(f"{module}.{function}" for module in modules)
    starred = _star_imports(script, modules)
    local = {function, *_aliases(script, function)}
    calls: list[cst.Call] = []
    rebindings: list[cst.Assign] = []
    unclear: list[cst.CSTNode] = []
    for node in script.nodes:
        if not isinstance(node, cst.Name | cst.Attribute) or dotted(node).rpartition(".")[2] not in local:
            continue
        if not is_read(script, node) or not (
            qualified(script, node) & wanted or (starred and _is_unbound(script, node, function))
        ):
            continue
        parent = script.parents[node]
        if isinstance(parent, cst.Call) and parent.func is node:
            calls.append(parent)
            if isinstance(node, cst.Name):
                unclear += [other for other in bound_where(script, node) if not _is_import_or_wrapper(script, other)]
            continue
        if isinstance(parent, cst.Attribute):
            continue  # pretrain.__name__ and the like
        rebinding = _rebinding(script, node)
        if rebinding is not None:
            rebindings.append(rebinding)
        else:
            unclear.append(node)
    return Uses(calls=tuple(calls), rebindings=tuple(rebindings), unclear=_unique(unclear))


def _aliases(script: Script, function: str) -> list[str]:
    """The names that a function is imported under, besides its own."""
    return [
        dotted(node.asname.name)
        for node in script.nodes
        if isinstance(node, cst.ImportAlias) and node.asname and dotted(node.name).rpartition(".")[2] == function
    ]


def _unique(nodes: list[cst.CSTNode]) -> tuple[cst.CSTNode, ...]:
    return tuple({id(node): node for node in nodes}.values())


def is_read(script: Script, node: cst.CSTNode) -> bool:
    """Whether a name stands for a value here: not in an import, not a keyword, not bound, not behind a dot."""
    parent = script.parents.get(node)
    if isinstance(parent, cst.Attribute):
        return parent.value is node
    if isinstance(parent, cst.Arg):
        return parent.value is node
    return not isinstance(
        parent,
        cst.ImportAlias | cst.ImportFrom | cst.AsName | cst.AssignTarget | cst.FunctionDef | cst.ClassDef | cst.Param,
    ) and not _is_target(script, node)


def _is_target(script: Script, node: cst.CSTNode) -> bool:
    outer = script.parents.get(node)
    while isinstance(outer, cst.Tuple | cst.List | cst.Element):
        outer = script.parents.get(outer)
    return isinstance(outer, cst.AssignTarget)


def _star_imports(script: Script, modules: Collection[str]) -> bool:
    return any(
        isinstance(node, cst.ImportFrom)
        and isinstance(node.names, cst.ImportStar)
        and node.module is not None
        and dotted(node.module) in modules
        for node in script.nodes
    )


def _is_unbound(script: Script, node: cst.CSTNode, function: str) -> bool:
    if not isinstance(node, cst.Name) or node.value != function:
        return False
    return all(_is_import_or_wrapper(script, other) for other in bound_where(script, node))


def _is_import_or_wrapper(script: Script, binding: cst.CSTNode) -> bool:
    if isinstance(binding, cst.Import | cst.ImportFrom):
        return True
    value = bound_value(script, binding)
    return isinstance(value, cst.Assign) and _wraps(script, value, binding)


def _rebinding(script: Script, node: cst.CSTNode) -> cst.Assign | None:
    """The assignment ``f, x = wrap(f)`` that a read of ``f`` belongs to."""
    argument = script.parents.get(node)
    call = script.parents.get(argument) if isinstance(argument, cst.Arg) else None
    assign = script.parents.get(call) if isinstance(call, cst.Call) else None
    if not isinstance(assign, cst.Assign) or not isinstance(node, cst.Name):
        return None
    return assign if _wraps(script, assign, node) else None


def _wraps(script: Script, assign: cst.Assign, name: cst.CSTNode) -> bool:
    """Whether an assignment binds a name to the result of a call that takes the old value as its first argument.

    ``partial`` is no such wrapper: it moves the positions of the arguments.
    """
    call = assign.value
    if not isinstance(call, cst.Call) or not call.args or not isinstance(name, cst.Name):
        return False
    first = call.args[0].value
    if not isinstance(first, cst.Name) or first.value != name.value:
        return False
    if qualified(script, call.func) & {"functools.partial"} or dotted(call.func).rpartition(".")[2] == "partial":
        return False
    target: cst.CSTNode = assign.targets[0].target
    if isinstance(target, cst.Tuple | cst.List):
        elements = target.elements
        target = elements[0].value if elements else target
    return len(assign.targets) == 1 and isinstance(target, cst.Name) and target.value == name.value
