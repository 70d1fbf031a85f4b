"""The changes of a recipe, as a transformation of the tree: an import, arguments wrapped, keywords added.

Nothing is deleted or reformatted; comments and whitespace stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import libcst as cst
from libcst import matchers as m

from megaresume.patching.choose import refusal
from megaresume.patching.provider import Judge
from megaresume.patching.script import imports_of

if TYPE_CHECKING:
    from megaresume.patching.choose import Fit
    from megaresume.patching.recipe import Accepts, AddImport, Wrap
    from megaresume.patching.script import Script


class Codemod(cst.CSTTransformer):
    """What a recipe changes in a script.

    Raises:
        PatchError: an argument is missing, or cannot be told to be what it should be.
    """

    def __init__(self, script: Script, fit: Fit) -> None:
        super().__init__()
        self.script = script
        self.fit = fit
        #: what is done, and how the changed line can be told.
        self.changes: list[tuple[str, str]] = []
        self._wrapped: dict[cst.Arg, Wrap] = {}
        self._added: dict[cst.Call, list[Wrap]] = {}
        self._before = self._place_of_import(fit.recipe.add_import)
        self._plan()

    @property
    def line(self) -> int:
        """The line, from 1, of the statement that the import goes before, or of the import that is there."""
        return self.script.line(self._before)

    def _plan(self) -> None:
        add = self.fit.recipe.add_import
        self._refuse_shadow(add)
        self.has_import = self._before in self._own_imports(add)
        if not self.has_import:
            self.changes.append((f"import {add.module}",) * 2)
        for wrap in self.fit.recipe.wraps:
            argument = self.fit.arguments[wrap.call].get(wrap.parameter)
            call = self.fit.calls[wrap.call]
            if argument is not None:
                self._check(wrap, argument)
                self._wrapped[argument] = wrap
                what = f"{wrap.parameter} of {wrap.call} wrapped in {wrap.function}"
                self.changes.append((what, f"{wrap.function}("))
            elif wrap.if_absent == "add_keyword":
                self._added.setdefault(call, []).append(wrap)
                words = f"{wrap.parameter}={wrap.function}()"
                self.changes.append((f"{words} added to {self.script.source(call.func)}", words))
            else:
                raise refusal(
                    self.script,
                    self.fit.recipe,
                    f"{wrap.call} is called without {wrap.parameter}",
                    found=self.script.quote(call),
                    expected=f"an argument {wrap.parameter}",
                    cause="a script that gives it in another way",
                )

    def _check(self, wrap: Wrap, argument: cst.Arg) -> None:
        if reason := Judge(self.script, wrap.accepts).why_not(argument.value):
            raise refusal(
                self.script,
                self.fit.recipe,
                f"{wrap.parameter} of {wrap.call} cannot be told",
                found=f"{self.script.quote(argument)}: {reason}",
                expected=_expected(wrap.accepts),
                cause="a script that the recipe is not for, or a provider that is made elsewhere",
            )

    # -- the import

    def _place_of_import(self, add: AddImport) -> cst.CSTNode:
        """The import of our own that is there; or the top-level statement that the import goes before."""
        body = self.script.module.body
        if own := self._own_imports(add):
            return own[0]
        first = 1 if m.matches(body[0], _DOCSTRING) else 0
        for index, statement in enumerate(body):
            if _imports_any(statement, ("__future__", *add.after)):
                first = index + 1
        return next((one for one in body[first:] if _imports_any(one, add.before)), body[min(first, len(body) - 1)])

    def _own_imports(self, add: AddImport) -> list[cst.CSTNode]:
        """Top-level statements ``import MODULE``, without another name."""
        own = m.Import(names=[m.ZeroOrMore(), m.ImportAlias(name=_name(add.module), asname=None), m.ZeroOrMore()])
        line = m.SimpleStatementLine(body=[m.ZeroOrMore(), own, m.ZeroOrMore()])
        return [statement for statement in self.script.module.body if m.matches(statement, line)]

    def _refuse_shadow(self, add: AddImport) -> None:
        """The module's name must not stand for something else where it is used."""
        root = add.module.partition(".")[0]
        for call in self.fit.calls.values():
            for node in self.script.bindings(call.func, root):
                if not isinstance(node, cst.Import) or any(alias.asname is not None for alias in node.names):
                    raise refusal(
                        self.script,
                        self.fit.recipe,
                        f"the name {root} is taken",
                        found=self.script.quote(node),
                        expected=f"{root} to be free for `import {add.module}`",
                        cause="a variable, function or import of the same name",
                    )

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        """Insert the import, below the comments that belong to the statement after it."""
        if self.has_import:
            return updated_node
        index = original_node.body.index(self._before)
        after = updated_node.body[index]
        text = f"import {self.fit.recipe.add_import.module}"
        statement = cst.parse_statement(text, original_node.config_for_parsing).with_changes(
            leading_lines=after.leading_lines
        )
        rest = (after.with_changes(leading_lines=()), *updated_node.body[index + 1 :])
        return updated_node.with_changes(body=(*updated_node.body[:index], statement, *rest))

    # -- arguments

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        """``argument`` becomes ``function(argument)``."""
        wrap = self._wrapped.get(original_node)
        if wrap is None:
            return updated_node
        value = cst.Call(func=cst.parse_expression(wrap.function), args=[cst.Arg(updated_node.value)])
        return updated_node.with_changes(value=value)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        """Add keywords that are missing."""
        for wrap in self._added.get(original_node, ()):
            updated_node = _with_keyword(updated_node, wrap)
        return updated_node


_DOCSTRING = m.SimpleStatementLine(body=[m.Expr(m.SimpleString() | m.ConcatenatedString()), m.ZeroOrMore()])


def _name(module: str) -> m.Name | m.Attribute:
    root, _, last = module.rpartition(".")
    return m.Attribute(value=_name(root), attr=m.Name(last)) if root else m.Name(last)


def _expected(accepts: Accepts) -> str:
    parts = [] if accepts.parameters is None else [f"a function with {accepts.parameters} required parameter(s)"]
    return ", or ".join([*parts, *([] if accepts.name is None else [f"a name like {accepts.name}"])])


def _imports_any(statement: cst.CSTNode, modules: tuple[str, ...]) -> bool:
    """Whether a top-level statement imports one of some modules, or below them, when the file is executed."""
    names = [name for node in _executed(statement) for name in imports_of(node)]
    return any(name == module or name.startswith(module + ".") for name in names for module in modules)


def _executed(statement: cst.CSTNode) -> Iterator[cst.Import | cst.ImportFrom]:
    """The imports that run when the module is imported: not those in the bodies of functions."""
    if isinstance(statement, cst.Import | cst.ImportFrom):
        yield statement
    elif not isinstance(statement, cst.FunctionDef | cst.Lambda):
        for child in statement.children:
            yield from _executed(child)


def _with_keyword(call: cst.Call, wrap: Wrap) -> cst.Call:
    """``parameter=function()`` after the last argument, on a line of its own where that has one."""
    no_space = cst.SimpleWhitespace("")
    new = cst.Arg(
        keyword=cst.Name(wrap.parameter),
        value=cst.Call(cst.parse_expression(wrap.function)),
        equal=cst.AssignEqual(no_space, no_space),
    )
    if not call.args:
        new = new.with_changes(whitespace_after_arg=call.whitespace_before_args)
        return call.with_changes(args=[new], whitespace_before_args=no_space)
    *others, last = call.args
    before = others[-1].comma.whitespace_after if others else call.whitespace_before_args  # type: ignore[union-attr]
    on_own_line = isinstance(before, cst.ParenthesizedWhitespace)
    if isinstance(last.comma, cst.Comma):
        # A comment after the comma belongs to the last argument, and stays there.
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
        # Here it stands before the closing parenthesis: the new argument takes it along.
        space = before.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=()) if on_own_line else None
        new = new.with_changes(whitespace_after_arg=last.whitespace_after_arg)
        comma = cst.Comma(whitespace_after=space or cst.SimpleWhitespace(" "))
        last = last.with_changes(comma=comma, whitespace_after_arg=no_space)
    return call.with_changes(args=[*others, last, new])
