"""Insertions as patched lines that can be found again, and undone, without any copy of the original.

A `Hunk` is a run of whole lines that holds insertions: a hash of the lines, to recognise them wherever other edits have
moved them, and what was inserted where. Line ends count as one character and as equal, so that a checkout that converts
them changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from megaresume.patching.lines import END, split_lines

__all__ = ["Hunk", "Lost", "digest", "find", "insert", "undo"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hunk:
    """Lines that hold insertions."""

    #: the first line, from 1, in the patched file without the marker.
    line: int
    #: how many lines.
    count: int
    #: hash of the lines.
    digest: str
    #: (offset in the lines, inserted text), rising; line ends are one byte.
    cuts: tuple[tuple[int, str], ...]


class Lost(Exception):
    """A hunk cannot be found again, or not at one place only: its lines were edited, or copied."""

    def __init__(self, hunk: Hunk, places: Sequence[int]) -> None:
        super().__init__(hunk.line)
        self.hunk = hunk
        #: lines, from 1, where it could be: none if it was edited, several if it was copied.
        self.places = tuple(places)


def digest(data: bytes) -> str:
    """Sixteen hexadecimal digits of SHA-256: enough to tell edited lines, short enough for a comment."""
    return hashlib.sha256(data).hexdigest()[:16]


def _plain(data: bytes) -> bytes:
    """Line ends as one byte."""
    return END.sub(b"\n", data)


def insert(data: bytes, groups: Sequence[Sequence[tuple[int, str]]]) -> tuple[bytes, list[Hunk]]:
    """Insert texts.

    Args:
        data: the file.
        groups: for each change its (offset into data, ASCII text); what has the same offset stays in this order.
            A change that spans lines makes one hunk of them.

    Returns:
        the new file, and the hunks in the order of their lines.
    """
    # (offset, number of the group, text), in the order of the file
    pieces = sorted(
        ((offset, group, text) for group, items in enumerate(groups) for offset, text in items), key=lambda p: p[0]
    )
    parts: list[bytes] = []
    placed: list[tuple[int, int, bytes]] = []  # (offset in the new file, group, text)
    length = last = 0
    for offset, group, text in pieces:
        parts += [data[last:offset], text.encode("ascii")]
        length += offset - last
        placed.append((length, group, parts[-1]))
        length += len(parts[-1])
        last = offset
    patched = b"".join([*parts, data[last:]])
    return patched, _hunks(patched, placed)


def _hunks(patched: bytes, placed: list[tuple[int, int, bytes]]) -> list[Hunk]:
    lines = split_lines(patched)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def index(offset: int) -> int:
        return next(i for i in range(len(lines)) if starts[i + 1] > offset)

    ranges: dict[int, tuple[int, int]] = {}  # group -> first and last line, from 0
    for offset, group, text in placed:
        first, last = index(offset), index(offset + len(text) - 1)
        low, high = ranges.get(group, (first, last))
        ranges[group] = (min(low, first), max(high, last))
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges.values()):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    hunks = []
    for low, high in merged:
        begin, end = starts[low], starts[high + 1]
        cuts = tuple(
            (len(_plain(patched[begin:offset])), _plain(text).decode("ascii"))
            for offset, _, text in placed
            if begin <= offset < end
        )
        block = _plain(patched[begin:end]).removesuffix(b"\n")
        hunks.append(Hunk(line=low + 1, count=high - low + 1, digest=digest(block), cuts=cuts))
    return hunks


def find(data: bytes, hunks: Sequence[Hunk], shift: int = 0) -> list[int]:
    """Where hunks are now.

    Args:
        data: the patched file without the marker, perhaps edited since.
        hunks: what to find.
        shift: lines by which the marker has moved; where a hunk fits several places, the one that moved as far is it.

    Returns:
        the first line of each, from 0.

    Raises:
        Lost: a hunk's lines were edited, or copied so that they cannot be told apart.
    """
    lines = [_plain(line) for line in split_lines(data)]
    result: list[int] = []
    for hunk in hunks:
        places = [
            i
            for i in range(len(lines) - hunk.count + 1)
            if digest(b"".join(lines[i : i + hunk.count]).removesuffix(b"\n")) == hunk.digest
        ]
        expected = hunk.line - 1 + shift
        if len(places) > 1 and expected in places:
            places = [expected]
        if len(places) != 1 or (result and places[0] <= result[-1]):
            raise Lost(hunk, [place + 1 for place in places])
        result += places
    return result


def undo(data: bytes, hunks: Sequence[Hunk], shift: int = 0) -> bytes:
    """Take the insertions out again. Raises Lost, as `find` does."""
    lines = split_lines(data)
    for place, hunk in reversed(list(zip(find(data, hunks, shift), hunks, strict=True))):
        cells = _cells(b"".join(lines[place : place + hunk.count]))
        for offset, text in reversed(hunk.cuts):
            inserted = b"".join(cells[offset : offset + len(text)])
            # The last line of a file may have lost its end; the hash ignores that, and so does this.
            if _plain(inserted).removesuffix(b"\n") != text.encode().removesuffix(b"\n"):
                raise Lost(hunk, [])
            del cells[offset : offset + len(text)]
        lines[place : place + hunk.count] = [b"".join(cells)]
    return b"".join(lines)


def _cells(data: bytes) -> list[bytes]:
    """The bytes one by one, a line end as one."""
    cells: list[bytes] = []
    last = 0
    for match in END.finditer(data):
        cells += [data[i : i + 1] for i in range(last, match.start())]
        cells.append(match[0])
        last = match.end()
    return cells + [data[i : i + 1] for i in range(last, len(data))]
