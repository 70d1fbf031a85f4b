"""A launch log, checked against the table of known symptoms (``known.yaml``). Streamed: a log may have many gigabytes.

file (plain, or gzip by its first bytes)  ->  blocks of whole lines  ->  texts of the table  ->  its expressions
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal

import yaml

from megaresume.runs.doctor import Check, Status
from megaresume.runs.first_error import find_first_error
from megaresume.stream.errors import UsageError

#: bytes of a block; a line of more is looked at in pieces.
_BLOCK = 4 << 20
#: bytes of a line that an expression is tried on; characters of it that are shown.
_LONGEST, _SHOWN = 20_000, 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Symptom:
    """One entry of the table."""

    name: str
    level: Literal["error", "warning", "note"]
    find: tuple[bytes, ...]
    match: re.Pattern[str] | None
    means: str
    do: str
    samples: tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class Hit:
    """A symptom that a log shows."""

    symptom: Symptom
    #: of the first one, counted from 1, and its text.
    line: int
    text: str
    #: lines that show it.
    count: int = 1


@cache
def symptoms() -> tuple[Symptom, ...]:
    """The table."""
    entries: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("known.yaml").read_text(encoding="utf-8"))
    return tuple(
        Symptom(
            name=entry["name"],
            level=entry["level"],
            find=tuple(text.encode() for text in entry["find"]),
            match=re.compile(entry["match"]) if "match" in entry else None,
            means=entry["means"],
            do=entry["do"],
            samples=tuple(entry["samples"]),
        )
        for entry in entries
    )


def scan(path: Path, progress: Callable[[int], object] | None = None) -> list[Hit]:
    """Look for every symptom.

    Args:
        path: the log; gzip is recognised.
        progress: called with the bytes of the file that were read since.

    Returns:
        in order of their first line.

    Raises:
        UsageError: it cannot be read.
    """
    hits: dict[str, Hit] = {}
    lines = 0
    try:
        with open(path, "rb") as raw:
            is_gzip = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            read = 0
            for block in _blocks(gzip.GzipFile(fileobj=raw) if is_gzip else raw):
                _look(block, lines, hits)
                lines += block.count(b"\n")
                if progress is not None:
                    progress(raw.tell() - read)
                    read = raw.tell()
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(
            "the log cannot be read",
            found=f"{path}: {error}",
            expected="a text file, or one of gzip",
            action="check the path",
        ) from error
    return sorted(hits.values(), key=lambda hit: hit.line)


def _blocks(file: BufferedIOBase) -> Iterator[bytes]:
    rest = b""
    while data := file.read(_BLOCK):
        data = rest + data
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) >= 4 * _BLOCK:  # no line is so long: a progress bar, or no text at all
            end = len(data)
        if end:
            yield data[:end]
        rest = data[end:]
    if rest:
        yield rest


def _look(block: bytes, lines: int, hits: dict[str, Hit]) -> None:
    # By where its line begins: a line may hold several texts of one symptom.
    found: dict[tuple[str, int], Symptom] = {}
    for symptom in symptoms():
        for text in symptom.find:
            at = block.find(text)
            while at >= 0:
                begin = max(block.rfind(b"\n", 0, at), block.rfind(b"\r", 0, at)) + 1
                found[symptom.name, begin] = symptom
                at = block.find(text, at + len(text))
    for (name, begin), symptom in sorted(found.items(), key=lambda item: item[0][1]):
        ends = [end for end in (block.find(b"\n", begin), block.find(b"\r", begin)) if end >= 0]
        stop = min([*ends, begin + _LONGEST, len(block)])
        line = block[begin:stop].decode("utf-8", "replace")
        if symptom.match is not None and not symptom.match.search(line):
            continue
        hit = hits.get(name)
        if hit is None:
            shown = "".join(c if c.isprintable() else " " for c in line).strip()
            number = lines + block.count(b"\n", 0, begin) + 1
            hits[name] = Hit(symptom=symptom, line=number, text=shown[:_SHOWN])
        else:
            hit.count += 1


def log_checks(path: Path, progress: Callable[[int], object] | None = None) -> list[Check]:
    """One check for each symptom that a log shows, in order of their first line. Raises UsageError."""
    status: dict[str, Status] = {"error": "problem", "warning": "warning", "note": "note"}
    found = []
    for hit in scan(path, progress):
        times = f"line {hit.line:,}" + (f", {hit.count:,} times" if hit.count > 1 else "")
        symptom, text = hit.symptom, f"{path.name} {times}: {hit.text}"
        found.append(Check("log", symptom.name, status[symptom.level], text, symptom.means, symptom.do))
    return found or [Check("log", "known symptoms", "ok", f"none of {len(symptoms())} in {path.name}")]


def first_failure(paths: Sequence[Path]) -> list[Check]:
    """Which rank failed first, from the logs of all nodes of one launch together; [] if none shows an error.

    Args:
        paths: plain text, of which the last MiB is looked at.
    """
    error = find_first_error(paths, "")
    if error is None:
        return []
    found = f"{error}: {error.headline or 'it printed no error'}"
    cause = "launchers print their own traceback after it; other ranks only noticed that it was gone"
    return [Check("log", "first failure", "note", found, cause, "fix this one first")]
