"""`Watch`: the progress of a run, from its recorded steps; shows a bar."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from megaresume.cluster.records import RunRecords, read_any


class Watch:
    """Follows the records of a run.

    Args:
        records: file or directory.
        steps: of the whole run.
        what: shown with the bar.
    """

    def __init__(self, records: Path, steps: int, what: str) -> None:
        from tqdm import tqdm

        self._path = records
        self._size = -1
        self._times: list[float] = []
        #: the last step done; and where the last start began.
        self.step = 0
        #: the records as last read; None: none yet.
        self.records: RunRecords | None = None
        #: when the records last changed, in seconds of `time.monotonic`.
        self.changed = time.monotonic()
        self._bar = tqdm(total=steps, desc=what, unit="step", disable=None, leave=False, file=sys.stderr)
        self.reached(None)

    @property
    def starts(self) -> int:
        """The number of starts so far."""
        return 0 if self.records is None else len(self.records.starts)

    @property
    def start(self) -> int:
        """The step that the last start began with; 0 without a start."""
        return int(self.records.starts[-1]["step"]) if self.records is not None and self.records.starts else 0

    @property
    def step_seconds(self) -> float:
        """Seconds per step, averaged over the last ones."""
        last = self._times[-4:]
        return (last[-1] - last[0]) / max(len(last) - 1, 1) if last else 0.0

    def reached(self, step: int | None) -> bool:
        """Read the records again; returns whether this step is done (None: False)."""
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
    """Bytes of a file, or of all files in a directory."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir())
    return path.stat().st_size if path.exists() else 0
