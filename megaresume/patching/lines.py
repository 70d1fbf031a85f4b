"""Lines as Python counts them, on bytes: they end at ``\\n``, ``\\r\\n`` or ``\\r``, and at nothing else."""

from __future__ import annotations

import re

__all__ = ["END", "first_line_end", "line_of", "split_lines"]

END = re.compile(rb"\r\n|\n|\r")


def split_lines(data: bytes) -> list[bytes]:
    """The lines with their ends; joined they are ``data`` again. `bytes.splitlines` would do, spelled for str too."""
    return data.splitlines(keepends=True)


def line_of(data: bytes, offset: int) -> int:
    """The line, from 1, that holds the byte at an offset."""
    return len(END.findall(data[:offset])) + 1


def first_line_end(data: bytes) -> bytes:
    """How this file ends its lines: as its first line does; ``\\n`` for a file of one line."""
    match = END.search(data)
    return match[0] if match else b"\n"
