"""The comment that a patch leaves: which recipe, and what undoing needs.

    # megaresume-patch 1: recipe megatron-lm-0.19 version 1 (to undo: megaresume patch --revert SCRIPT)
    # megaresume-patch at 53 original 6b3c... patched 0f1e...
    # megaresume-patch 57 1 93aa3e8f4c6f6fd7 [[0, "import megaresume\\n"]]
    # megaresume-patch 529 1 4b1c90a0f3fd2c11 [[8, "megaresume.provider("], [62, ")"]]
    # megaresume-patch end 1d2c3b4a59687766
    import megaresume

``original`` and ``patched`` are hashes of the whole file before, and after without this comment: undoing an untouched
patch must give the first. A line for each `Hunk`: first line, lines, hash, what was inserted where. ``end`` is a hash
of the lines above it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megaresume.patching.errors import PatchError
from megaresume.patching.hunks import Hunk, digest
from megaresume.patching.lines import END, split_lines

__all__ = ["Marker", "read_marker", "with_marker"]

#: raised when the comment's form changes. Older forms stay readable.
FORMAT = 1

_PREFIX = b"# megaresume-patch "
_HEAD = re.compile(r"1: recipe ([a-z0-9._-]+) version (\d+) \(.*\)")
_FORMAT = re.compile(r"(\d+): ")
_PLACE = re.compile(r"at (\d+) original ([0-9a-f]{64}) patched ([0-9a-f]{16})")
_HUNK = re.compile(r"(\d+) (\d+) ([0-9a-f]{16}) (\[.*\])")
_END = re.compile(r"end ([0-9a-f]{16})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """What the comment says."""

    recipe: str
    version: int
    #: SHA-256 of the file before the patch.
    original: str
    #: hash of the patched file without the marker.
    patched: str
    #: the line, from 1, that the comment began in.
    line: int
    #: with lines of the patched file without the marker.
    hunks: tuple[Hunk, ...]

    @property
    def num_lines(self) -> int:
        """Lines of the comment."""
        return len(self.hunks) + 3


def _render(marker: Marker) -> list[str]:
    lines = [
        f"{FORMAT}: recipe {marker.recipe} version {marker.version} (to undo: megaresume patch --revert SCRIPT)",
        f"at {marker.line} original {marker.original} patched {marker.patched}",
    ]
    for hunk in marker.hunks:
        line = hunk.line + (marker.num_lines if hunk.line >= marker.line else 0)
        lines.append(f"{line} {hunk.count} {hunk.digest} {json.dumps(hunk.cuts)}")
    return [*lines, f"end {_check(lines)}"]


def _check(lines: Sequence[str]) -> str:
    return digest("\n".join(lines).encode())


def with_marker(patched: bytes, marker: Marker, newline: bytes) -> bytes:
    """Put the comment before line ``marker.line`` of a patched file."""
    lines = split_lines(patched)
    comment = [_PREFIX + line.encode("ascii") + newline for line in _render(marker)]
    return b"".join([*lines[: marker.line - 1], *comment, *lines[marker.line - 1 :]])


def read_marker(data: bytes, name: str) -> tuple[Marker, bytes, int] | None:
    """Read the comment of a patched file.

    Returns:
        what it says, the file without it, and the line, from 1, where it is now; None if there is none.

    Raises:
        PatchError: the comment was edited, or is of a newer megaresume.
    """
    lines = split_lines(data)
    indices = [i for i, line in enumerate(lines) if line.startswith(_PREFIX)]
    if not indices:
        return None
    first = indices[0]
    texts = [END.sub(b"", lines[i][len(_PREFIX) :]).decode("ascii", "replace") for i in indices]
    number = _FORMAT.match(texts[0])
    if number is not None and int(number[1]) > FORMAT:
        raise PatchError(
            f"{name} was patched by a newer megaresume",
            found=f"line {first + 1}: {lines[first].decode('ascii', 'replace').strip()}",
            expected=f"a marker of format {FORMAT}",
            action="use that version, or a newer one",
        )
    marker = _parse(texts) if indices == list(range(first, first + len(indices))) else None
    if marker is None:
        shown = ", ".join(str(i + 1) for i in indices)
        raise PatchError(
            f"{name}: the marker of the patch was edited",
            found=f"lines {shown}: begin with {_PREFIX.decode().strip()}, but are not as they were written",
            expected="the comment as megaresume wrote it",
            cause="a formatter, a merge, or an edit by hand",
            action="restore these lines or the file from version control; or take out by hand the comment, "
            "`import megaresume`, and every megaresume.SOMETHING(...) around an argument",
        )
    return marker, b"".join(lines[:first] + lines[first + len(indices) :]), first + 1


def _parse(texts: list[str]) -> Marker | None:
    if len(texts) < 4:
        return None
    head, place, end = _HEAD.fullmatch(texts[0]), _PLACE.fullmatch(texts[1]), _END.fullmatch(texts[-1])
    found = [_HUNK.fullmatch(text) for text in texts[2:-1]]
    if head is None or place is None or end is None or end[1] != _check(texts[:-1]):
        return None
    hunks = []
    for match in found:
        if match is None:
            return None
        cuts = tuple((offset, text) for offset, text in json.loads(match[4]))
        hunks.append(Hunk(line=int(match[1]), count=int(match[2]), digest=match[3], cuts=cuts))
    marker = Marker(
        recipe=head[1],
        version=int(head[2]),
        original=place[2],
        patched=place[3],
        line=int(place[1]),
        hunks=tuple(hunks),
    )
    moved = tuple(
        replace(hunk, line=hunk.line - marker.num_lines) if hunk.line > marker.line else hunk for hunk in hunks
    )
    return replace(marker, hunks=moved)
