"""A recipe and a script -> insertions of text. Nothing is ever deleted or rewritten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import libcst as cst

from megaresume.patching.calls import Bound, refuse
from megaresume.patching.lines import END, first_line_end
from megaresume.patching.names import bindings_of, dotted
from megaresume.patching.providers import why_not

if TYPE_CHECKING:
    from megaresume.patching.choose import Fit
    from megaresume.patching.recipe import AddImport, WrapArgument
    from megaresume.patching.script import Script

__all__ = ["Edit", "Insertion", "plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Insertion:
    """ASCII text to insert; what has the same offset is ordered by ``rank``."""

    #: bytes into `Script.utf8`.
    offset: int
    text: str
    #: 0 closes what was opened before, 1 goes on after it, 2 opens.
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """One change, in words, and its insertions."""

    what: str
    insertions: tuple[Insertion, ...]


def plan(script: Script, fit: Fit) -> tuple[int, list[Edit]]:
    """The changes of a recipe.

    Returns:
        where the marker goes, an offset into `Script.utf8` at the start of a line; and the changes.

    Raises:
        PatchError: an argument is missing, or cannot be told to be what it should be.
    """
    at = _import_offset(script, fit.recipe.add_import)
    edits: list[Edit] = []
    _refuse_shadow(script, fit)
    if not _imports_already(script, fit.recipe.add_import.module):
        text = f"import {fit.recipe.add_import.module}{_end_at(script, at)}"
        edits.append(Edit(what=text.strip(), insertions=(Insertion(offset=at, text=text, rank=1),)))
    added: dict[str, list[WrapArgument]] = {}
    for wrap in fit.recipe.wraps:
        bound = fit.bound[wrap.call]
        argument = bound.arguments.get(wrap.parameter)
        if argument is not None:
            edits.append(_wrap(script, fit, wrap, argument))
        elif wrap.if_absent == "add_keyword":
            added.setdefault(wrap.call, []).append(wrap)
        else:
            raise refuse(
                script,
                fit.recipe,
                f"{wrap.call} is called without {wrap.parameter}",
                found=script.quote(bound.call),
                expected=f"an argument {wrap.parameter}",
                cause="a script that gives it in another way",
            )
    edits += [_add_keywords(script, fit.bound[call], wraps) for call, wraps in added.items()]
    return at, edits


# -- arguments


def _wrap(script: Script, fit: Fit, wrap: WrapArgument, argument: cst.Arg) -> Edit:
    reason = why_not(script, argument.value, wrap.accepts)
    if reason is not None:
        raise refuse(
            script,
            fit.recipe,
            f"{wrap.parameter} of {wrap.call} cannot be told",
            found=f"{script.quote(argument)}: {reason}",
            expected=_expected(wrap),
            cause="another script than the recipe is for, or a provider that is made elsewhere",
        )
    # The whole value with its own parentheses: an argument's span ends after them, and begins with its keyword.
    start = script.start(argument)
    if argument.keyword is not None and isinstance(argument.equal, cst.AssignEqual):
        start += len((script.source(argument.keyword) + script.source(argument.equal)).encode())
    return Edit(
        what=f"{wrap.parameter} of {wrap.call} wrapped in {wrap.function}",
        insertions=(
            Insertion(offset=start, text=f"{wrap.function}(", rank=2),
            Insertion(offset=script.end(argument), text=")", rank=0),
        ),
    )


def _expected(wrap: WrapArgument) -> str:
    parts = []
    if wrap.accepts.parameters is not None:
        parts.append(f"a function with {wrap.accepts.parameters} required parameter(s)")
    if wrap.accepts.name is not None:
        parts.append(f"a name like {wrap.accepts.name}")
    return ", or ".join(parts)


def _add_keywords(script: Script, bound: Bound, wraps: list[WrapArgument]) -> Edit:
    """``parameter=function()`` after the last argument, on a line of its own where that has one."""
    words = [f"{wrap.parameter}={wrap.function}()" for wrap in wraps]
    what = f"{', '.join(words)} added to {bound.call.func and script.source(bound.call.func)}"
    if not bound.call.args:
        at = script.end(bound.call.func) + len(script.source(bound.call.whitespace_after_func).encode()) + 1
        return Edit(what=what, insertions=(Insertion(offset=at, text=", ".join(words), rank=1),))
    last = bound.call.args[-1]
    utf8, end = script.utf8, script.end(last)
    indent = _own_line(utf8, script.start(last))
    if indent is None:
        text = "".join(f", {word}" for word in words)
        return Edit(what=what, insertions=(Insertion(offset=end, text=text, rank=1),))
    newline = _end_at(script, end)
    if not isinstance(last.comma, cst.Comma):
        text = "".join(f",{newline}{indent}{word}" for word in words)
        return Edit(what=what, insertions=(Insertion(offset=end, text=text, rank=1),))
    # After the comma, and after a comment that belongs to the last argument.
    match = END.search(utf8, end)
    close = script.end(bound.call)
    if match is None or match.start() >= close:
        text = "".join(f", {word}" for word in words)
        return Edit(what=what, insertions=(Insertion(offset=end, text=text, rank=1),))
    text = "".join(f"{newline}{indent}{word}," for word in words)
    return Edit(what=what, insertions=(Insertion(offset=match.start(), text=text, rank=1),))


def _own_line(utf8: bytes, offset: int) -> str | None:
    """The indentation of what begins at an offset, if nothing stands before it on its line."""
    ends = [match.end() for match in END.finditer(utf8, 0, offset)]
    before = utf8[ends[-1] if ends else 0 : offset]
    return before.decode() if not before.strip() else None


def _end_at(script: Script, offset: int) -> str:
    """How the line at an offset ends."""
    match = END.search(script.utf8, offset)
    return (match[0] if match else first_line_end(script.utf8)).decode()


# -- the import


def _import_offset(script: Script, add: AddImport) -> int:
    """The start of the top-level statement that the import goes before."""
    body = script.module.body
    first = 1 if body and _is_docstring(body[0]) else 0
    for index, statement in enumerate(body):
        if _imports_any(statement, ("__future__", *add.after)):
            first = index + 1
    chosen = next((s for s in body[first:] if _imports_any(s, add.before)), None)
    if chosen is None:
        chosen = body[min(first, len(body) - 1)]
    start = script.start(chosen)
    ends = [match.end() for match in END.finditer(script.utf8, 0, start)]
    return ends[-1] if ends else 0


def _is_docstring(statement: cst.CSTNode) -> bool:
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and isinstance(statement.body[0], cst.Expr)
        and isinstance(statement.body[0].value, cst.SimpleString | cst.ConcatenatedString)
    )


def _imports_any(statement: cst.CSTNode, modules: tuple[str, ...]) -> bool:
    """Whether a top-level statement imports one of some modules, or below them, when the file is executed."""
    for node in _executed(statement):
        names: list[str] = []
        if isinstance(node, cst.Import):
            names = [dotted(alias.name) for alias in node.names]
        elif isinstance(node, cst.ImportFrom) and node.module is not None and not node.relative:
            names = [dotted(node.module)]
            if not isinstance(node.names, cst.ImportStar):
                names += [f"{names[0]}.{dotted(alias.name)}" for alias in node.names]
        if any(name == module or name.startswith(module + ".") for name in names for module in modules):
            return True
    return False


def _executed(statement: cst.CSTNode):  # type: ignore[no-untyped-def]
    """What runs when the module is imported: not the bodies of functions."""
    if isinstance(statement, cst.FunctionDef | cst.Lambda):
        return
    yield statement
    for child in statement.children:
        yield from _executed(child)


def _refuse_shadow(script: Script, fit: Fit) -> None:
    """The module's name must not stand for something else where it is used."""
    root = fit.recipe.add_import.module.partition(".")[0]
    for bound in fit.bound.values():
        for node in bindings_of(script, bound.call, root):
            names = [] if not isinstance(node, cst.Import) else list(node.names)
            if not any(alias.asname is None and dotted(alias.name).partition(".")[0] == root for alias in names):
                raise refuse(
                    script,
                    fit.recipe,
                    f"the name {root} is taken",
                    found=script.quote(node),
                    expected=f"{root} to be free for `import {fit.recipe.add_import.module}`",
                    cause="a variable, function or import of the same name",
                )


def _imports_already(script: Script, module: str) -> bool:
    """Whether ``import MODULE`` stands at the top level, without another name."""
    for statement in script.module.body:
        for node in _executed(statement):
            if isinstance(node, cst.Import) and isinstance(statement, cst.SimpleStatementLine):
                for alias in node.names:
                    if dotted(alias.name) == module and alias.asname is None:
                        return True
    return False
