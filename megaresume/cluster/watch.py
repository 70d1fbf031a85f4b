"""`Watch`: how far a run is, by what it records of its steps; with a bar for people."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from megaresume.cluster.records import RunRecords, read_any


class Watch:
    """Looks at the records again and again.

    Args:
        records: file or directory.
        steps: of the whole run.
        what: in front of the bar.
    """

    def __init__(self, records: Path, steps: int, what: str) -> None:
        from tqdm import tqdm

        self._path = records
        self._size = -1
        self._times: list[float] = []
        #: the last step done, and where the last start began.
        self.step = 0
        #: the records as read last; None: nothing yet.
        self.records: RunRecords | None = None
        #: seconds of `time.monotonic` when there was something new.
        self.changed = time.monotonic()
        self._bar = tqdm(total=steps, desc=what, unit="step", disable=None, leave=False, file=sys.stderr)
        self.reached(None)

    @property
    def starts(self) -> int:
        """The number of starts so far."""
        return 0 if self.records is None else len(self.records.starts)

    @property
    def start(self) -> int:
        """The step that the last one began with; 0: there is none."""
        return int(self.records.starts[-1]["step"]) if self.records is not None and self.records.starts else 0

    @property
    def step_seconds(self) -> float:
        """The seconds of a step, the average of the last ones."""
        last = self._times[-4:]
        return (last[-1] - last[0]) / max(len(last) - 1, 1) if last else 0.0

    def reached(self, step: int | None) -> bool:
        """Look again; say whether this step is done (None: no)."""
        size = _size(self._path)
        if size != self._size:
            self._size = size
            self.changed = time.monotonic()
            self.records = read_any(self._path) if size else None
            done = 0 if self.records is None else max([self.start, *self.records.steps])
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
