"""The comment that a patch leaves: which recipe, and the changed lines, as they were and as they are.

    # megaresume-patch 1: recipe megatron-lm-0.19 version 1 (to undo: megaresume patch --revert SCRIPT)
    # megaresume-patch 5 [] -> ["import megaresume"]
    # megaresume-patch 467 ["        provider,"] -> ["        megaresume.provider(provider),"]
    # megaresume-patch original 6b3c... check 1d2c3b4a59687766
    import megaresume

A line for each `Hunk`: its line, counted from the first of the comment. ``original`` is the SHA-256 of the file before
the patch, ``check`` a hash of the comment. Lines are compared without their ends, so that a checkout that converts
them changes nothing; bytes above 127 stand as in Latin-1, whatever the encoding of the file.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megaresume.patching.errors import PatchError

#: raised when the comment's form changes.
FORMAT = 1

_PREFIX = b"# megaresume-patch "
_HEAD = re.compile(r"1: recipe ([a-z0-9._-]+) version (\d+) \(.*\)")
_HUNK = re.compile(r"(-?\d+) (\[.*\]) -> (\[.*\])")
_END = re.compile(r"original ([0-9a-f]{64}) check ([0-9a-f]{16})")
_LINE_END = re.compile(rb"[\r\n]*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hunk:
    """Lines that a patch changed."""

    #: the first, counted from the comment: in the file without it, from 0.
    line: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """What the comment says."""

    recipe: str
    version: int
    #: SHA-256 of the file before the patch.
    original: str
    hunks: tuple[Hunk, ...]

    @property
    def num_lines(self) -> int:
        """Lines of the comment."""
        return len(self.hunks) + 2


class Lost(Exception):
    """A hunk cannot be found again, or not at one place only: its lines were edited, or copied."""

    def __init__(self, hunk: Hunk, places: Sequence[int]) -> None:
        super().__init__(hunk.line)
        self.hunk = hunk
        #: lines, from 1, where it could be: none if it was edited, several if it was copied.
        self.places = tuple(places)


def _texts(lines: Sequence[bytes]) -> list[str]:
    """Lines without their ends."""
    return [_LINE_END.sub(b"", line).decode("latin-1") for line in lines]


def _check(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def diff(data: bytes, patched: bytes, origin: int) -> tuple[Hunk, ...]:
    """The changed lines; ``origin`` is the line, from 0, that the comment will go before."""
    old, new = _texts(data.splitlines()), _texts(patched.splitlines())
    return tuple(
        Hunk(line=first - origin, old=tuple(old[begin:end]), new=tuple(new[first:last]))
        for tag, begin, end, first, last in difflib.SequenceMatcher(None, old, new).get_opcodes()
        if tag != "equal"
    )


def with_marker(patched: bytes, marker: Marker, origin: int) -> bytes:
    """Put the comment before line ``origin``, from 0, of a patched file."""
    lines = patched.splitlines(keepends=True)
    texts = [f"{FORMAT}: recipe {marker.recipe} version {marker.version} (to undo: megaresume patch --revert SCRIPT)"]
    for hunk in marker.hunks:
        line = hunk.line + (marker.num_lines if hunk.line >= 0 else 0)
        texts.append(f"{line} {json.dumps(hunk.old)} -> {json.dumps(hunk.new)}")
    texts.append(f"original {marker.original} check {_check([*texts, marker.original])}")
    end = (_LINE_END.search(lines[origin]) or [b""])[0] or b"\n"
    return b"".join([*lines[:origin], *(_PREFIX + text.encode("ascii") + end for text in texts), *lines[origin:]])


def read_marker(data: bytes, name: str) -> tuple[Marker, bytes, int] | None:
    """Read the comment of a patched file.

    Returns:
        what it says, the file without it, and the line, from 0, where it is now; None if there is none.

    Raises:
        PatchError: the comment was edited, or is of a newer megaresume.
    """
    lines = data.splitlines(keepends=True)
    indices = [i for i, line in enumerate(lines) if line.startswith(_PREFIX)]
    if not indices:
        return None
    first = indices[0]
    texts = [text[len(_PREFIX) :] for text in _texts([lines[i] for i in indices])]
    number = re.match(r"(\d+): ", texts[0])
    if number is not None and int(number[1]) > FORMAT:
        raise PatchError(
            f"{name} was patched by a newer megaresume",
            found=f"line {first + 1}: {lines[first].decode('latin-1').strip()}",
            expected=f"a marker of format {FORMAT}",
            action="use that version, or a newer one",
        )
    marker = _parse(texts) if indices == list(range(first, first + len(indices))) else None
    if marker is None:
        raise PatchError(
            f"{name}: the marker of the patch was edited",
            found=f"lines {', '.join(str(i + 1) for i in indices)}: begin with {_PREFIX.decode().strip()}, "
            "but are not as they were written",
            expected="the comment as megaresume wrote it",
            cause="a formatter, a merge, or an edit by hand",
            action="restore these lines or the file from version control; or take out by hand the comment, "
            "`import megaresume`, and every megaresume.SOMETHING(...) around an argument",
        )
    return marker, b"".join(lines[:first] + lines[first + len(indices) :]), first


def _parse(texts: list[str]) -> Marker | None:
    head, end = _HEAD.fullmatch(texts[0]), _END.fullmatch(texts[-1])
    found = [_HUNK.fullmatch(text) for text in texts[1:-1]]
    if head is None or end is None or not all(found) or end[2] != _check([*texts[:-1], end[1]]):
        return None
    hunks = [
        Hunk(line=int(one[1]), old=tuple(json.loads(one[2])), new=tuple(json.loads(one[3]))) for one in found if one
    ]
    moved = tuple(
        Hunk(line=hunk.line - (len(texts) if hunk.line >= 0 else 0), old=hunk.old, new=hunk.new) for hunk in hunks
    )
    return Marker(recipe=head[1], version=int(head[2]), original=end[1], hunks=moved)


def find(data: bytes, hunks: Sequence[Hunk], origin: int) -> list[int]:
    """Where hunks are now.

    Args:
        data: the patched file without the comment, perhaps edited since.
        hunks: what to find.
        origin: the line, from 0, where the comment was; where a hunk fits several places, the one that has moved as
            far is it.

    Returns:
        the first line of each, from 0.

    Raises:
        Lost: a hunk's lines were edited, or copied so that they cannot be told apart.
    """
    texts = _texts(data.splitlines())
    result: list[int] = []
    for hunk in hunks:
        count, expected = len(hunk.new), origin + hunk.line
        places = [i for i in range(len(texts) - count + 1) if tuple(texts[i : i + count]) == hunk.new]
        if len(places) > 1 and expected in places:
            places = [expected]
        if len(places) != 1 or (result and places[0] <= result[-1]):
            raise Lost(hunk, [place + 1 for place in places])
        result += places
    return result


def undo(data: bytes, hunks: Sequence[Hunk], origin: int) -> bytes:
    """Put the old lines in the place of the new ones, with the ends that those have. Raises Lost, as `find` does."""
    lines = data.splitlines(keepends=True)
    for place, hunk in reversed(list(zip(find(data, hunks, origin), hunks, strict=True))):
        ends = [(_LINE_END.search(line) or [b""])[0] for line in lines[place : place + len(hunk.new)]]
        ends = ends[: len(hunk.old) - 1] + ends[-1:]
        old = [text.encode("latin-1") + end for text, end in zip(hunk.old, ends, strict=False)]
        lines[place : place + len(hunk.new)] = old
    return b"".join(lines)
