"""Unified diffs on bytes, as `patch` and `git apply` take them."""

from __future__ import annotations

import difflib

__all__ = ["unified_diff"]


def unified_diff(old: bytes, new: bytes, name: str) -> bytes:
    """The difference of two files of one name; empty if they are equal."""
    header = name.encode()
    pieces = difflib.diff_bytes(
        difflib.unified_diff, _lines(old), _lines(new), b"a/" + header, b"b/" + header, lineterm=b"\n"
    )
    # A last line without end has to say so, or it would run into the next.
    return b"".join(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in pieces)


def _lines(data: bytes) -> list[bytes]:
    """Lines that end in ``\\n`` alone: a lone ``\\r`` is no line end for the tools that read a diff."""
    lines = data.split(b"\n")
    result = [line + b"\n" for line in lines[:-1]]
    return [*result, lines[-1]] if lines[-1] else result
