"""The position of a run between two saves: one small record, replaced every N steps, which survives the machine.

    every N steps   rank 0, in a thread: step, samples, digest -> <save>/megaresume/position.json -> the copies
    the next start  its ledger line has what the process before it had reached (`reached`)

It shows `top`, `report` and goodput which steps were done and lost. No start uses it: only a complete checkpoint is
loaded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path, records_dir
from megaresume.checkpoint.records.sealed import from_members, read_record, seal
from megaresume.checkpoint.system import utc
from megaresume.files import leftover_name
from megaresume.stream.errors import MegaresumeError, StateError

FORMAT, VERSION = "megaresume.position", 1

log = logging.getLogger(__name__)

#: least seconds between two copies; most seconds that the end of a run waits for the last one.
GAP, JOIN_SECONDS = 1.0, 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The position of a process."""

    run: str
    #: number of starts of the run, including that of this process.
    start: int
    iteration: int
    samples: int
    #: digest of the samples, 16 hex digits; None: the order is not megaresume's.
    digest: str | None
    #: UTC.
    time: str
    #: steps between two records.
    every: int

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return seal({"format": FORMAT, "version": VERSION, **asdict(self)})


def position_path(root: Path) -> Path:
    """The path of the record."""
    return records_dir(root) / "position.json"


def read_position(root: Path) -> Position | None:
    """The newest position in a root; None if there is none, or it cannot be read: nothing depends on it."""
    path = position_path(root)
    if not path.exists():
        return None
    with contextlib.suppress(MegaresumeError):
        return read_record(
            path,
            lambda fields: from_members(Position, fields),
            what="the position of the run",
            format_name=FORMAT,
            version=VERSION,
            error=StateError,
        )
    return None


def write_position(root: Path, data: bytes) -> None:
    """Replace the record. Not forced to the disk, which a kill does not require. Raises OSError."""
    path = position_path(root)
    draft = path.with_name(leftover_name(path.name))
    draft.write_bytes(data)
    os.replace(draft, path)


def share_position(source: Path, target: Path) -> None:
    """Copy the position from one root to another, if it is newer."""
    ours, theirs = read_position(target), read_position(source)
    if theirs is not None and (ours is None or (ours.start, ours.time) < (theirs.start, theirs.time)):
        with contextlib.suppress(OSError):
            records_dir(target).mkdir(parents=True, exist_ok=True)
            write_position(target, theirs.to_bytes())


def reached(root: Path) -> dict[str, Any] | None:
    """What the process before this start had reached, for this start's ledger line, which is not yet written; None if
    unknown. Raises StateError: the ledger cannot be read.
    """
    position = read_position(root)
    if position is None:
        return None
    entries = read_ledger(ledger_path(root)).entries
    starts = sum(entry.kind == "start" for entry in entries)
    if not entries or (position.run, position.start) != (entries[0].run, starts):
        return None
    names = ("iteration", "samples", "digest", "time", "every")
    return {name: getattr(position, name) for name in names}


class Positions:
    """Records the position of this process. On rank 0.

    Args:
        root: where the run saves.
        every: steps between records.
        run, start: see `Position`.
        digest: returns the digest of this many samples.
        send: copies the record to the copies' storage; None: there are no copies.
    """

    def __init__(
        self,
        root: Path,
        every: int,
        *,
        run: str,
        start: int,
        digest: Callable[[int], str | None],
        send: Callable[[bytes], None] | None,
    ) -> None:
        self.root, self.every, self._run_id, self._start = root, every, run, start
        self._digest, self._send = digest, send
        self._changed = threading.Condition()
        #: (steps, samples, seconds since 1970) not written yet.
        self._newest: tuple[int, int, float] | None = None
        self._closing = self._said = False
        self._thread = threading.Thread(target=self._run, name="megaresume-position", daemon=True)
        self._thread.start()

    def note(self, step: int, samples: Callable[[], int]) -> None:
        """Note the number of steps done. Returns at once."""
        if step % self.every == 0:
            with self._changed:
                self._newest = step, samples(), time.time()
                self._changed.notify()

    def close(self) -> None:
        """Write the last position, in limited time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        unsent, next_time = b"", 0.0
        while True:
            with self._changed:
                wait = max(next_time - time.monotonic(), 0.0) if unsent else None
                self._changed.wait_for(lambda: self._newest is not None or self._closing, wait)
                newest, self._newest, is_last = self._newest, None, self._closing
            try:
                if newest is not None:
                    unsent = self._write(*newest)
                if unsent and self._send is not None and (is_last or time.monotonic() >= next_time):
                    next_time = time.monotonic() + GAP
                    self._send(unsent)
                    unsent = b""
                if self._send is None:
                    unsent = b""
            except Exception as error:  # noqa: BLE001  nothing that fails here may reach the training
                if not self._said:
                    self._said = True
                    log.warning("megaresume: the position of the run is not noted: %s; this is logged once", error)
            if is_last:
                return

    def _write(self, step: int, samples: int, seconds: float) -> bytes:
        position = Position(
            run=self._run_id,
            start=self._start,
            iteration=step,
            samples=samples,
            digest=self._digest(samples),
            time=utc(seconds),
            every=self.every,
        )
        data = position.to_bytes()
        write_position(self.root, data)
        return data


def reached_of(details: Mapping[str, Any]) -> tuple[int, int, str, int] | None:
    """(steps, samples, time, every) of the process before a start, from the start's line; None if it has none."""
    told = details.get("reached")
    try:
        return int(told["iteration"]), int(told["samples"]), str(told["time"]), int(told["every"])  # type: ignore[index]
    except (TypeError, KeyError, ValueError):
        return None
