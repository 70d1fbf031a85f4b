"""The ledger: JSON lines that are never changed, one for every checkpoint, start and end of a run.

It outlives pruned checkpoints, and shows which run a directory belongs to, and in which order things happened;
`branches` derives from it which checkpoints lead to the present.

Every line is sealed (`megaresume.files`). A kill during an append leaves a torn last line: it is reported, not used,
and closed off by the next append. Damaged lines elsewhere are reported by number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, get_args

from megaresume.checkpoint.records.names import recorded_tag
from megaresume.checkpoint.records.sealed import SealError, from_members, members, seal, unseal
from megaresume.checkpoint.system import Topology
from megaresume.files import (
    READABLE,
    check_regular,
    fsync_dir,
    fsync_file,
    is_torn,
    make_dir,
    open_file,
    read_file,
    write_all,
    write_atomic,
    write_error,
)
from megaresume.stream.errors import StateError
from megaresume.stream.state import is_version

FORMAT = "megaresume.ledger"
VERSION = 1

EntryKind = Literal["checkpoint", "durable", "start", "finished", "membership"]

#: set by a launch script for its ranks: the attempt that they belong to, any word. In the details of every line.
ATTEMPT = "MEGARESUME_ATTEMPT"


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """One event of a run."""

    #: ``checkpoint``: one was committed, and is complete. ``durable``: it is on the disk. ``start``: a process group
    #: began to train from here. ``finished``: nothing is left to train. ``membership``: replicas left or joined, and
    #: did this step together.
    kind: EntryKind
    #: of the checkpoint, of the beginning of the start, or the last step.
    iteration: int
    #: the tag directory saved, or loaded; None: a start from nothing, or an end.
    tag: str | None
    #: samples trained, and their digest.
    samples: int
    digest: str
    #: the id of the run, 16 hex digits: the same in all lines of a root.
    run: str
    #: UTC. For a checkpoint, complete or durable: when its save began.
    time: str
    topology: Topology
    #: further information: ``save_id``, ``bytes`` and ``save_seconds`` of a checkpoint; for a start the id of the save
    #: that it ``loaded``, and the place that it loaded from, ``startup_seconds`` since its process began, and what the
    #: process before it had ``reached``; for both the id of the ``start``; ``attempt`` of a launch script; notes. Plain
    #: JSON.
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The line, with its newline."""
        members = {name: getattr(self, name) for name in _MEMBERS if name != "details" or self.details}
        return seal({"format": FORMAT, "version": VERSION, **members, "topology": self.topology.to_dict()})


_MEMBERS = tuple(field.name for field in dataclasses.fields(LedgerEntry))


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerProblem:
    """A line that cannot be used."""

    #: counted from 1.
    line: int
    #: the rest of a sentence about the line.
    reason: str
    #: torn: the last line, whose writer was killed. cut: the same, closed off by a later append; only that line is
    #: lost. damaged: anything else.
    kind: Literal["torn", "cut", "damaged"] = "damaged"

    def __str__(self) -> str:
        return f"ledger line {self.line} {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerReading:
    """The content of a ledger, and what of it cannot be read."""

    entries: tuple[LedgerEntry, ...] = ()
    problems: tuple[LedgerProblem, ...] = ()

    @property
    def events(self) -> tuple[LedgerEntry, ...]:
        """The positions of the run, in order. A line about durability is not one: it comes at any time after the
        commit, possibly from the next start.
        """
        return tuple(entry for entry in self.entries if entry.kind != "durable")

    @property
    def run(self) -> str | None:
        """The run that the ledger belongs to."""
        return self.entries[0].run if self.entries else None


def read_ledger(path: Path) -> LedgerReading:
    """Read every readable line. A missing ledger counts as empty.

    Raises:
        StateError: the file exists but cannot be read at all.
        NewerFormatError: a line has a newer version.
    """
    try:
        data = read_file(path)
    except FileNotFoundError:
        return LedgerReading()
    except OSError as error:
        raise _unreadable(path, error) from error
    with _without_gc():
        return _read(path, data.split(b"\n"))


def _unreadable(path: Path, error: OSError) -> StateError:
    return StateError.unreadable("the ledger", error, "a readable file", at=path, action=READABLE)


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Pause garbage collection while many objects are created and kept: it would take a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _read(path: Path, lines: list[bytes]) -> LedgerReading:
    entries: list[LedgerEntry] = []
    problems: list[LedgerProblem] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            entries.append(_entry(path, unseal(line)))
        except SealError as error:
            if number == len(lines):  # after the last newline
                reason = f"is torn after {len(line)} bytes (a writer was killed while appending)"
                problems.append(LedgerProblem(line=number, reason=reason, kind="torn"))
            else:
                problems.append(LedgerProblem(line=number, reason=str(error), kind="cut" if error.cut else "damaged"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problems.append(LedgerProblem(line=number, reason=f"lacks a field or has a wrong one: {error}"))
    return LedgerReading(entries=tuple(entries), problems=tuple(problems))


#: bytes at the end of a ledger: some hundred lines.
_TAIL = 64 << 10


def newest_entries(path: Path) -> tuple[LedgerEntry, ...]:
    """The last lines of a ledger, some hundred; empty if it cannot be read: for polling every few seconds."""
    try:
        with BufferedReader(open_file(path)) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _TAIL, 0))
            data = file.read()
    except OSError:
        return ()
    lines = data.split(b"\n")
    return _read(path, lines if size <= _TAIL else lines[1:]).entries


def last_start(path: Path) -> str | None:
    """The id of the last start in a ledger; None if there is none near its end."""
    named = (entry.details.get("start") for entry in reversed(newest_entries(path)))
    return next((start for start in named if isinstance(start, str)), None)


def read_run(path: Path) -> str | None:
    """The run of a ledger, from its first good line, without reading more. None if there is none."""
    try:
        with BufferedReader(open_file(path)) as file:
            for line in file:
                try:
                    return _entry(path, unseal(line)).run
                except (SealError, KeyError, TypeError, ValueError, AttributeError):
                    continue
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    return None


def _entry(path: Path, fields: Mapping[str, Any]) -> LedgerEntry:
    version = fields["version"]
    if fields["format"] != FORMAT or not is_version(version, VERSION, "the ledger", path):
        raise ValueError(f"it is a {fields['format']!r}, version {version!r}")
    topology, tag = Topology.from_dict, recorded_tag
    return from_members(LedgerEntry, {"details": {}, **fields}, kind=_kind, tag=tag, topology=topology, details=members)


def _kind(value: object) -> object:
    if value not in get_args(EntryKind):
        raise ValueError(f"unknown kind {value!r:.80}")
    return value


def with_attempt(details: Mapping[str, Any]) -> dict[str, Any]:
    """Details of a line of this process, with the attempt set by a launch script, if any."""
    attempt = os.environ.get(ATTEMPT)
    return {**details, "attempt": attempt} if attempt else dict(details)


def append_ledger(path: Path, entry: LedgerEntry) -> None:
    """Append one line, durably; a torn last line is closed off first.

    Raises:
        CheckpointError: it cannot be written.
    """
    append_lines(path, [entry.to_bytes()])


def merge_lines(lines: Sequence[bytes], others: Iterable[bytes]) -> list[bytes]:
    """Merge the lines of a ledger with those that only another ledger of the run has.

    A missing line is inserted before the line that follows it in the other ledger, or at the end if none does: lines
    that only one machine has come before the starts elsewhere that it has learned of since.
    """
    there, placed = set(lines), set[bytes]()
    before: dict[bytes, list[bytes]] = {}
    waiting: list[bytes] = []
    for line in others:
        if line in there:
            before.setdefault(line, []).extend(waiting)
            waiting = []
        elif line not in placed:
            placed.add(line)
            waiting.append(line)
    merged: list[bytes] = []
    for line in lines:
        merged += before.pop(line, ())
        merged.append(line)
    return [*merged, *waiting]


def add_lines(path: Path, others: Iterable[bytes]) -> None:
    """Add lines of another ledger of the run, see `merge_lines`: appended, if none belongs before an existing one. As
    the owner of the root.

    Raises:
        CheckpointError: it cannot be written.
        StateError: the ledger cannot be read.
    """
    reading = read_ledger(path)
    there = [entry.to_bytes() for entry in reading.entries]
    merged = merge_lines(there, others)
    if path.exists() and merged[: len(there)] == there:
        append_lines(path, merged[len(there) :])
    elif merged:
        make_dir(path.parent)
        raw = read_file(path).split(b"\n") if reading.problems else []
        damaged = [raw[problem.line - 1] + b"\n" for problem in reading.problems]
        write_atomic(path, b"".join([*merged, *damaged]))


def append_lines(path: Path, lines: Sequence[bytes]) -> None:
    """Append lines of another ledger, like `append_ledger`."""
    if not lines:
        return
    make_dir(path.parent)
    try:
        new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
        try:
            check_regular(descriptor, path)
            write_all(descriptor, (b"\n" if is_torn(descriptor) else b"") + b"".join(lines))
            fsync_file(descriptor)
        finally:
            os.close(descriptor)
        if new:
            fsync_dir(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
