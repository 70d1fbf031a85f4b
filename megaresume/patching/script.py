"""A script as bytes, as text and as a concrete syntax tree, with the exact place of every node.

Offsets are bytes into ``utf8``, the text without byte order mark as UTF-8, whatever the file's own encoding is;
`Script.in_file` turns them into offsets into the file.
"""

from __future__ import annotations

import ast
import codecs
import io
import tokenize
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megaresume.patching.errors import PatchError
from megaresume.patching.lines import line_of, split_lines
from megaresume.stream.errors import SetupError, UsageError

if TYPE_CHECKING:
    import libcst as cst

__all__ = ["Script"]


class Script:
    """A parsed script.

    Args:
        data: the file's bytes.
        name: what to call it in messages.

    Raises:
        UsageError: not Python, with the line.
        PatchError: Python, but not in a form that survives parsing byte for byte.
        SetupError: libcst is not installed.
    """

    def __init__(self, data: bytes, name: str) -> None:
        cst = _libcst()
        from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper, ParentNodeProvider, ScopeProvider

        self.data = data
        self.name = name
        self.encoding, self.bom = _encoding(data, name)
        try:
            self.text = data[len(self.bom) :].decode(self.encoding)
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{name} is not a Python script",
                found=f"bytes that are not {self.encoding}, in line {line_of(data, error.start)}",
                expected=f"a script in {self.encoding}, or one that declares its encoding in the first line",
            ) from error
        try:
            self.module = cst.parse_module(self.text)
        except cst.ParserSyntaxError as error:
            line, found = _syntax_error(data) or (error.raw_line, error.message)
            lines = split_lines(self.utf8)
            shown = lines[line - 1].decode().strip()[:160] if line <= len(lines) else "the end of the file"
            raise UsageError(
                f"{name} is not a Python script: syntax error in line {line}",
                found=f"{shown}: {found}",
                expected="a script that Python can run",
                action=f"python -m py_compile {name}",
            ) from error
        if self.module.code != self.text:
            raise PatchError(
                f"{name} cannot be changed without changing other bytes of it",
                found="line ends or characters that do not survive parsing",
                expected="lines that end in \\n or \\r\\n",
                cause="line ends of old Macintosh files (a lone \\r)",
                action=f"convert its line ends, or use the launcher: torchrun -m megaresume.run {name} ...",
            )
        wrapper = MetadataWrapper(self.module, unsafe_skip_copy=True)
        self._spans = wrapper.resolve(ByteSpanPositionProvider)
        self.parents = wrapper.resolve(ParentNodeProvider)
        self.scopes = wrapper.resolve(ScopeProvider)

    @cached_property
    def utf8(self) -> bytes:
        """The text as UTF-8: what offsets count in."""
        return self.text.encode("utf-8")

    @cached_property
    def nodes(self) -> tuple[cst.CSTNode, ...]:
        """All nodes, in the order of the text."""
        found: list[cst.CSTNode] = []
        waiting: list[cst.CSTNode] = [self.module]
        while waiting:
            node = waiting.pop()
            found.append(node)
            waiting += reversed(node.children)
        return tuple(found)

    def start(self, node: cst.CSTNode) -> int:
        """Where a node begins, without comments and blank lines before it."""
        return int(self._spans[node].start)

    def end(self, node: cst.CSTNode) -> int:
        """Where a node ends."""
        return int(self._spans[node].start + self._spans[node].length)

    def line(self, node: cst.CSTNode) -> int:
        """The line, from 1, that a node begins in."""
        return line_of(self.utf8, self.start(node))

    def source(self, node: cst.CSTNode) -> str:
        """A node as it is written."""
        return str(self.module.code_for_node(node))

    def quote(self, node: cst.CSTNode) -> str:
        """``line N: its text``, for messages."""
        line = self.line(node)
        return f"line {line}: {split_lines(self.utf8)[line - 1].decode().strip()[:160]}"

    def in_file(self, offset: int) -> int:
        """An offset into ``utf8`` as an offset into ``data``."""
        if self.encoding == "utf-8":
            return len(self.bom) + offset
        return len(self.bom) + len(self.utf8[:offset].decode().encode(self.encoding))


def _encoding(data: bytes, name: str) -> tuple[str, bytes]:
    bom = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        raise UsageError(
            f"{name} is not a Python script", found=str(error), expected="UTF-8, or an encoding that Python knows"
        ) from error
    return ("utf-8" if encoding == "utf-8-sig" else codecs.lookup(encoding).name), bom


def _syntax_error(data: bytes) -> tuple[int, str] | None:
    """Line and words of Python itself, which are what users know; None where it accepts the script."""
    try:
        ast.parse(data)
    except (SyntaxError, ValueError) as error:
        return getattr(error, "lineno", None) or 1, getattr(error, "msg", None) or str(error)
    return None


def _libcst() -> Any:
    try:
        import libcst
    except ImportError as error:
        raise SetupError(
            "libcst is not installed",
            found=str(error),
            expected="libcst, which parses a script without losing its format",
            action="pip install 'megaresume[patch]'",
        ) from error
    return libcst
