"""The files in which a run's processes record figures; read by `megaresume top` and the next start.

    <save>/megaresume/meter/run.jsonl          rank 0: one line per start, save and end
    <save>/megaresume/meter/pulse.json         rank 0, in place, once a second: position, for a start after a kill
    <save>/megaresume/meter/figures.jsonl      rank 0: one line per reading
    <save>/megaresume/meter/rank_00003.jsonl   each process: its waits, and the losses of its segments

Lines are JSON. They are not forced to the disk: lines lost in a power cut are missing, and torn ones are skipped.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaresume.files import is_torn, read_file, write_all

#: size of the pulse in bytes, padded: it is written in place, by one call.
_PULSE = 512


def meter_dir(root: Path) -> Path:
    """The directory of these files.

    Args:
        root: the checkpoint root.
    """
    return root / "megaresume" / "meter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """The position of a rank 0 process at a time. All seconds except ``time`` and ``born`` count for this process."""

    #: one of `EVENTS`. counts: a save begins, and the line only has the counts so far.
    event: str
    #: seconds since 1970.
    time: float
    step: int
    samples: int
    #: see `Clocks`.
    waited: float = 0.0
    saving: float = 0.0
    #: for a start: when the process was started, in seconds since 1970.
    born: float = 0.0
    #: for a start: the number of starts of the run, including this one.
    attempt: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, without what is 0."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) or name in _ALWAYS}

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> Mark:
        """Read a mark. Raises KeyError, TypeError or ValueError if the line is not one."""
        kinds = {"event": str, "step": int, "samples": int, "attempt": int}
        return cls(**{name: kinds.get(name, float)(line[name]) for name in cls.__slots__ if name in line})


_ALWAYS = ("event", "time", "step", "samples")
#: start: training begins. save: training continues after a save of ``step``. last: how far a killed process had come,
#: written by the next one. end: it ended by itself. now: it runs.
EVENTS = ("start", "save", "last", "end", "now")


#: lines kept while the disk is full; older ones are dropped.
MAX_LINES = 1 << 12


class Lines:
    """A file of JSON lines that one process appends to.

    Args:
        path: of the file.
        keep: whether lines that could not be written are retried with the next one.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, *, keep: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        #: whether the last line was truncated by a kill, or a full disk.
        self._is_torn = is_torn(self._file)
        self._waiting: deque[bytes] = deque(maxlen=keep)

    def append(self, line: Mapping[str, Any]) -> None:
        """Append one line, after those that are waiting. Raises OSError."""
        waiting = [*self._waiting, json.dumps(line, separators=(",", ":")).encode() + b"\n"]
        try:
            while waiting:
                before, self._is_torn = b"\n" if self._is_torn else b"", True
                write_all(self._file, before + waiting[0])
                self._is_torn = False
                del waiting[0]
        finally:
            self._waiting.clear()
            self._waiting.extend(waiting)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class RunRecord:
    """The files of rank 0.

    Args:
        directory: see `meter_dir`.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._lines = Lines(directory / "run.jsonl", keep=MAX_LINES)
        #: the lines of earlier processes.
        self.before = read_lines(directory / "run.jsonl")
        marks, last = marks_of(self.before), read_pulse(directory)
        # Unless there is a later line: a kill right after writing it may have come before its pulse.
        if last is not None and last.event != "end" and not (marks and marks[-1].time >= last.time):
            self._lines.append(line := last.to_dict() | {"event": "last"})
            self.before.append(line)
        self._pulse = os.open(directory / "pulse.json", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def note(self, mark: Mark, more: Mapping[str, Any]) -> None:
        """Append a line, and update the pulse. Raises OSError."""
        self._lines.append(mark.to_dict() | dict(more))
        self.pulse(mark)

    def pulse(self, mark: Mark) -> None:
        """Write the current position of the process. Raises OSError."""
        os.pwrite(self._pulse, json.dumps(mark.to_dict()).encode().ljust(_PULSE - 1) + b"\n", 0)

    def close(self) -> None:
        """Close the files."""
        self._lines.close()
        os.close(self._pulse)


def read_pulse(directory: Path) -> Mark | None:
    """How far the newest process had come; None if unknown."""
    try:
        return Mark.from_dict(json.loads(read_file(directory / "pulse.json")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, without truncated ones; empty if it does not exist."""
    try:
        data = read_file(path)
    except OSError:
        return []
    return list(parsed(data.splitlines()))


def parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The readable lines."""
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def marks_of(lines: Iterable[Mapping[str, Any]], pulse: Mark | None = None) -> list[Mark]:
    """The marks of a run, in order; finally the pulse, if it is newer than the last line."""
    marks: list[Mark] = []
    for line in lines:
        try:
            mark = Mark.from_dict(line)
        except (KeyError, TypeError, ValueError):
            continue
        if mark.event in EVENTS:
            marks.append(mark)
    if pulse is not None and (not marks or pulse.time > marks[-1].time):
        marks.append(pulse)
    return marks


def counts_at(lines: Iterable[Mapping[str, Any]], samples: int) -> Mapping[str, Mapping[str, int]] | None:
    """Counts by source up to a sample: see `SourceFigures.counts`; None if no line has them for that sample.

    A run that went back has trained other samples since, maybe with other weights: counts beyond the start that went
    back are skipped.
    """
    found: dict[int, Mapping[str, Mapping[str, int]]] = {}
    for line in lines:
        place, counts = line.get("samples"), line.get("counts")
        if not isinstance(place, int):
            continue
        if line.get("event") == "start":
            found = {known: of for known, of in found.items() if known <= place}
        if isinstance(counts, dict):
            found[place] = counts
    return found.get(samples)


def rank_path(directory: Path, rank: int) -> Path:
    """The file of a process."""
    return directory / f"rank_{rank:05d}.jsonl"


class Tails:
    """Follows what the run's processes append to their files from now on.

    Args:
        directory: see `meter_dir`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read = {path: path.stat().st_size for path in directory.glob("rank_*.jsonl")}

    def new(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(name of the file, line) for every complete line since the last call."""
        for path in sorted(self._directory.glob("rank_*.jsonl")):
            before = self._read.get(path, 0)
            try:
                if path.stat().st_size <= before:
                    continue
                with path.open("rb") as file:
                    file.seek(before)
                    data = file.read()
            except OSError:
                continue
            end = data.rfind(b"\n") + 1
            self._read[path] = before + end
            for line in parsed(data[:end].splitlines()):
                yield path.name, line
