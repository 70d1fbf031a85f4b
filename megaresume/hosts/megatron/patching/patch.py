"""Apply, check and revert: from bytes to bytes, with every result verified before anything is written.

`Codemod` makes a recipe's changes in the tree: an import, and two arguments wrapped or one of them added. Nothing is
deleted or reformatted; comments and whitespace stay where they are.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import libcst as cst
from libcst import matchers as m

from megaresume.hosts.megatron.patching import PatchError
from megaresume.hosts.megatron.patching.choose import Beside, Fit, choose, refusal
from megaresume.hosts.megatron.patching.recipe import (
    FLAGS,
    PROVIDER,
    PatchMarker,
    Recipe,
    diff,
    read_marker,
    undo,
    with_marker,
)
from megaresume.hosts.megatron.patching.script import Judge, Script, imports_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """A patched script."""

    data: bytes
    recipe: Recipe
    #: Our lines: number in the patched file, from 1, and text.
    changes: tuple[tuple[int, str], ...]
    already: bool
    note: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reverted:
    """A script without the patch."""

    data: bytes
    marker: PatchMarker
    #: Whether it is the original byte for byte; otherwise, other lines were edited since, and are kept.
    exact: bool


Status = Literal["patched", "unpatched", "older", "newer", "edited", "stale", "unknown recipe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Whether a script is patched with the current version of its recipe, exactly as that would patch it now."""

    status: Status
    recipe: str | None = None
    version: int | None = None
    #: Why not, and what to do.
    reason: str | None = None
    action: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing needs to be done."""
        return self.status == "patched"


def apply(data: bytes, name: str, recipes: Sequence[Recipe], beside: Beside | None) -> Applied:
    """Patch a script.

    Args:
        data: its bytes.
        name: its name in messages.
        recipes: the recipes to choose from.
        beside: the megatron package next to it.

    Raises:
        UsageError: not Python.
        PatchError: no recipe fits, several do, the script cannot be changed safely, or it has another patch.
    """
    if read_marker(data, name) is not None:
        state = check(data, name, recipes, beside)
        if not state.ok:
            raise PatchError(f"{name} is patched already", found=state.reason, action=state.action)
        return Applied(data=data, recipe=_named(state.recipe, recipes), changes=(), already=True)
    script = Script(data, name)
    fit = choose(script, recipes, beside)
    codemod = Codemod(script, fit)
    patched = script.wrapper.visit(codemod).bytes
    marker = PatchMarker(
        recipe=fit.recipe.name,
        version=fit.recipe.version,
        original=hashlib.sha256(data).hexdigest(),
        hunks=diff(data, patched, codemod.line - 1),
        place=codemod.line - 1,
    )
    result = with_marker(patched, marker)
    _verify(data, result, name)
    first = codemod.line + marker.num_lines
    ours = ((first + hunk.line + i, text) for hunk in marker.hunks for i, text in enumerate(hunk.new))
    return Applied(
        data=result,
        recipe=fit.recipe,
        changes=tuple((number, text.strip()) for number, text in ours if "megaresume" in text),
        already=False,
        note=None if beside is None else beside.note(fit.recipe),
    )


def _named(name: str | None, recipes: Sequence[Recipe]) -> Recipe:
    return next(recipe for recipe in recipes if recipe.name == name)


def _verify(data: bytes, patched: bytes, name: str) -> None:
    """Check, before anything is written, that undoing gives the original and that the result is Python."""
    ast.parse(patched)
    if revert(patched, name).data != data:
        raise PatchError(
            f"{name} cannot be patched reversibly",
            found="undoing the patch would not give the same bytes",
            expected="the same bytes",
            cause="an encoding or line ends that are not handled",
            action="please report this script; meanwhile use the launcher: torchrun -m megaresume.run",
        )


def revert(data: bytes, name: str) -> Reverted:
    """Undo a patch.

    Raises:
        PatchError: the script is not patched, or lines of the patch were edited.
    """
    found = read_marker(data, name)
    if found is None:
        raise PatchError(
            f"{name} is not patched",
            found="no line that begins with # megaresume-patch",
            expected="the marker of a patch",
            cause="it was never patched, or the marker was deleted",
            action="nothing to do; what was changed by hand has to be undone by hand",
        )
    marker, rest = found
    result = undo(rest, marker, name)
    exact = hashlib.sha256(result).hexdigest() == marker.original
    return Reverted(data=result, marker=marker, exact=exact)


def check(data: bytes, name: str, recipes: Sequence[Recipe], beside: Beside | None) -> Checked:
    """Check whether a script is patched with the current version of its recipe, exactly as that would patch it now.

    Raises:
        UsageError: not Python.
    """
    try:
        if read_marker(data, name) is None:
            return Checked(status="unpatched", reason="it is not patched", action=f"megaresume patch {name}")
        before = revert(data, name)
    except PatchError as error:
        return Checked(status="edited", reason=error.line, action=error.action)
    status, reason, action = _judge(before, name, recipes, beside)
    marker = before.marker
    return Checked(status=status, recipe=marker.recipe, version=marker.version, reason=reason, action=action)


def _judge(
    before: Reverted, name: str, recipes: Sequence[Recipe], beside: Beside | None
) -> tuple[Status, str | None, str | None]:
    """The verdict on a patched script, the reason, and what to do."""
    marker, again = before.marker, f"megaresume patch --revert {name} && megaresume patch {name}"
    if marker.recipe not in (names := [recipe.name for recipe in recipes]):
        reason = f"it was patched with recipe {marker.recipe}, which is not among {', '.join(names)}"
        return "unknown recipe", reason, "name its file: --recipe FILE; or revert it: --revert"
    recipe = _named(marker.recipe, recipes)
    label = f"it was patched with version {marker.version} of {marker.recipe}"
    if marker.version < recipe.version:
        return "older", f"{label}; version {recipe.version} is current", again
    if marker.version > recipe.version:
        return "newer", f"{label}; this megaresume has {recipe.version}", "use the newer megaresume"
    try:
        now = revert(apply(before.data, name, [recipe], beside).data, name).marker
    except PatchError as error:
        return "stale", f"the recipe does not fit any more: {error.line}", error.action
    if now.hunks != marker.hunks:
        return "stale", "the script was edited, and the recipe would now patch it differently", again
    return "patched", None, None


class Codemod(cst.CSTTransformer):
    """Makes a recipe's changes in a script.

    Raises:
        PatchError: the provider is missing, or cannot be recognized as one.
    """

    def __init__(self, script: Script, fit: Fit) -> None:
        super().__init__()
        self.script, self.fit = script, fit
        self._refuse_shadow()
        self._before = self._place_of_import()
        recipe = fit.recipe
        #: Argument -> the function to wrap it in.
        self._wrapped = {self._provider(): PROVIDER}
        flags = fit.arguments[recipe.flags.of].get(recipe.flags.parameter)
        #: The call to add the flags to; None if it has an argument to wrap.
        self._without_flags = fit.calls[recipe.flags.of] if flags is None else None
        if flags is not None:
            self._wrapped[flags] = FLAGS

    @property
    def line(self) -> int:
        """The line, from 1, of the statement that the import goes before, or of our import if already there."""
        return self.script.line(self._before)

    def _provider(self) -> cst.Arg:
        wanted = self.fit.recipe.provider
        argument = self.fit.arguments[wanted.of].get(wanted.parameter)
        if argument is None:
            raise refusal(
                self.script,
                self.fit.recipe,
                f"{wanted.of} is called without {wanted.parameter}",
                found=self.script.quote(self.fit.calls[wanted.of]),
                expected=f"an argument {wanted.parameter}",
                cause="a script that passes it in another way",
            )
        if reason := Judge(self.script, wanted.named).why_not(argument.value):
            raise refusal(
                self.script,
                self.fit.recipe,
                f"{wanted.parameter} of {wanted.of} cannot be told",
                found=f"{self.script.quote(argument)}: {reason}",
                expected=f"a function with 1 required parameter, or a name like {wanted.named}",
                cause="a script that the recipe was not written for, or a provider that is made elsewhere",
            )
        return argument

    # -- the import

    def _place_of_import(self) -> cst.CSTNode:
        """Our import, if already there; otherwise the top-level statement that it goes before."""
        body, recipe = self.script.module.body, self.fit.recipe
        if own := [statement for statement in body if m.matches(statement, _OWN_IMPORT)]:
            return own[0]
        first = 1 if m.matches(body[0], _DOCSTRING) else 0
        for index, statement in enumerate(body):
            if _imports_any(statement, ("__future__", *recipe.import_after)):
                first = index + 1
        rest = (statement for statement in body[first:] if _imports_any(statement, recipe.import_before))
        return next(rest, body[min(first, len(body) - 1)])

    def _refuse_shadow(self) -> None:
        """Refuse if our name stands for something else where it is used."""
        for call in self.fit.calls.values():
            for node in self.script.bindings(call.func, "megaresume"):
                if not isinstance(node, cst.Import) or any(alias.asname is not None for alias in node.names):
                    raise refusal(
                        self.script,
                        self.fit.recipe,
                        "the name megaresume is taken",
                        found=self.script.quote(node),
                        expected="megaresume to be free for `import megaresume`",
                        cause="a variable, function or import of the same name",
                    )

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        """Insert the import below the comments that precede the next statement."""
        if m.matches(self._before, _OWN_IMPORT):
            return updated_node
        index = original_node.body.index(self._before)
        after = updated_node.body[index]
        statement = cst.parse_statement("import megaresume", original_node.config_for_parsing).with_changes(
            leading_lines=after.leading_lines
        )
        rest = (after.with_changes(leading_lines=()), *updated_node.body[index + 1 :])
        return updated_node.with_changes(body=(*updated_node.body[:index], statement, *rest))

    # -- arguments

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        """Turn ``argument`` into ``function(argument)``."""
        function = self._wrapped.get(original_node)
        if function is None:
            return updated_node
        return updated_node.with_changes(
            value=cst.Call(func=cst.parse_expression(function), args=[cst.Arg(updated_node.value)])
        )

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Add the missing keyword."""
        if original_node is not self._without_flags:
            return updated_node
        return _with_flags(updated_node, self.fit.recipe.flags.parameter)


_DOCSTRING = m.SimpleStatementLine(body=[m.Expr(m.SimpleString() | m.ConcatenatedString()), m.ZeroOrMore()])
_OWN_NAME = m.ImportAlias(name=m.Name("megaresume"), asname=None)
_OWN_IMPORT = m.SimpleStatementLine(
    body=[m.ZeroOrMore(), m.Import(names=[m.ZeroOrMore(), _OWN_NAME, m.ZeroOrMore()]), m.ZeroOrMore()]
)


def _imports_any(statement: cst.CSTNode, modules: tuple[str, ...]) -> bool:
    """Whether a top-level statement imports one of these modules or their submodules when the file is executed."""
    names = [name for node in _executed(statement) for name in imports_of(node)]
    return any(name == module or name.startswith(module + ".") for name in names for module in modules)


def _executed(statement: cst.CSTNode) -> Iterator[cst.Import | cst.ImportFrom]:
    """The imports that run when the module is imported: not those in function bodies."""
    if isinstance(statement, cst.Import | cst.ImportFrom):
        yield statement
    elif not isinstance(statement, cst.FunctionDef | cst.Lambda):
        for child in statement.children:
            yield from _executed(child)


def _with_flags(call: cst.Call, parameter: str) -> cst.Call:
    """Add ``P=megaresume.extra_args_provider()`` after the last argument, on a new line if that one is on its own."""
    no_space = cst.SimpleWhitespace("")
    new = cst.Arg(
        keyword=cst.Name(parameter),
        value=cst.Call(cst.parse_expression(FLAGS)),
        equal=cst.AssignEqual(no_space, no_space),
    )
    if not call.args:
        new = new.with_changes(whitespace_after_arg=call.whitespace_before_args)
        return call.with_changes(args=[new], whitespace_before_args=no_space)
    *others, last = call.args
    before = others[-1].comma.whitespace_after if others else call.whitespace_before_args  # type: ignore[union-attr]
    on_own_line = isinstance(before, cst.ParenthesizedWhitespace)
    if isinstance(last.comma, cst.Comma):
        # A comment after the comma belongs to the last argument and stays there.
        after = last.comma.whitespace_after
        between: cst.BaseParenthesizableWhitespace = cst.SimpleWhitespace(" ")
        if on_own_line and isinstance(after, cst.ParenthesizedWhitespace):
            between = before.with_changes(first_line=after.first_line, empty_lines=())
            after = after.with_changes(first_line=cst.TrailingWhitespace())
        elif isinstance(after, cst.ParenthesizedWhitespace) and after.first_line.comment is not None:
            between, after = after, no_space
        new = new.with_changes(comma=last.comma.with_changes(whitespace_after=after))
        last = last.with_changes(comma=last.comma.with_changes(whitespace_after=between))
    else:
        # Here a comment stands before the closing parenthesis, and moves behind the new argument.
        space = before.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=()) if on_own_line else None
        new = new.with_changes(whitespace_after_arg=last.whitespace_after_arg)
        comma = cst.Comma(whitespace_after=space or cst.SimpleWhitespace(" "))
        last = last.with_changes(comma=comma, whitespace_after_arg=no_space)
    return call.with_changes(args=[*others, last, new])
