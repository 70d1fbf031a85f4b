"""Progress of long work: a bar on a terminal, a widget in a notebook, a plain line now and then in a log."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: seconds between two lines in a log.
LOG_INTERVAL = 10.0
#: seconds of work after which it is worth showing at all.
QUIET_SECONDS = 1.0


#: called with the amount of work done since the last call.
Progress = Callable[[int], object]


class _Lines:
    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done = 0
        self._start = self._last = time.monotonic()

    def update(self, amount: int) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._last >= LOG_INTERVAL:
            self._last = now
            rate = self._done / max(now - self._start, 1e-9)
            of, left = "", ""
            if self._total is not None:
                of = f" of {spell_amount(self._total, self._unit)} ({100 * self._done / max(self._total, 1):.0f} %)"
                left = f", {(self._total - self._done) / max(rate, 1e-9):.0f} s left"
            done, speed = spell_amount(self._done, self._unit), spell_amount(rate, self._unit)
            print(f"{self._what}: {done}{of}, {speed}/s{left}", file=sys.stderr, flush=True)


def spell_amount(amount: float, unit: str) -> str:
    """``12 B``, ``3.4 GB``, ``2.5 G documents``."""
    if amount < 1000:
        return f"{amount:.0f} {unit}"
    prefix = ""
    for prefix in ("K", "M", "G", "T"):  # noqa: B007 - the last one is used below
        amount /= 1000
        if amount < 1000:
            break
    return f"{amount:.1f} {prefix}{unit}" if unit == "B" else f"{amount:.1f} {prefix} {unit}"


def in_notebook() -> bool:
    """Whether this is a cell of Jupyter that can show widgets."""
    if "ipykernel" not in sys.modules or importlib.util.find_spec("ipywidgets") is None:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")


@contextmanager
def progress(what: str, total: int | None, unit: str) -> Iterator[Progress]:
    """Show progress on standard error while the block runs.

    Args:
        what: what is being done, a few words.
        total: all the work, in ``unit``; None: unknown.
        unit: "documents" or "B" (shown with k, M, G).
    """
    if not in_notebook() and not sys.stderr.isatty():
        yield _Lines(what, total, unit).update
        return
    tqdm = importlib.import_module("tqdm.notebook" if in_notebook() else "tqdm").tqdm
    with tqdm(desc=what, total=total, unit=unit, unit_scale=True, delay=QUIET_SECONDS) as bar:
        yield bar.update
