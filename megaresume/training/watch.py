"""Follows the records of a run while it trains, with a progress bar on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from megaresume.training.records import RunRecords, read_records

__all__ = ["Watch"]


class Watch:
    """Looks at the records again and again.

    Args:
        records: file or directory.
        steps: of the whole run.
        what: in front of the bar.
        read: what is there -> its records.
    """

    def __init__(
        self, records: Path, steps: int, what: str, *, read: Callable[[Path], RunRecords | None] = read_records
    ) -> None:
        from tqdm import tqdm

        self._path, self._read = records, read
        self._size = -1
        self._times: list[float] = []
        #: the last step done, and where the last start began.
        self.step = 0
        #: as read last; None: nothing yet.
        self.records: RunRecords | None = None
        #: seconds of `time.monotonic` when there was something new.
        self.changed = time.monotonic()
        self._bar = tqdm(total=steps, desc=what, unit="step", disable=None, leave=False, file=sys.stderr)
        self.reached(None)

    @property
    def starts(self) -> int:
        """How many there have been."""
        return 0 if self.records is None else len(self.records.starts)

    @property
    def step_seconds(self) -> float:
        """Of the last steps, on average."""
        last = self._times[-4:]
        return (last[-1] - last[0]) / max(len(last) - 1, 1) if last else 0.0

    def reached(self, step: int | None) -> bool:
        """Look again; say whether this step is done (None: no)."""
        size = _size(self._path)
        if size != self._size:
            self._size = size
            self.changed = time.monotonic()
            self.records = self._read(self._path) if size else None
            done = _last_step(self.records)
            if done > self.step:
                self._times.append(time.monotonic())
            self.step = done
            self._bar.update(done - self._bar.n)
        return step is not None and self.step >= step

    def close(self) -> None:
        """Remove the bar."""
        self.reached(None)
        self._bar.close()


def _size(path: Path) -> int:
    """Bytes, in all files."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir())
    return path.stat().st_size if path.exists() else 0


def _last_step(records: RunRecords | None) -> int:
    if records is None:
        return 0
    starts: list[int] = [start["step"] for start in records.starts[-1:]]
    return max([0, *records.steps, *starts])
