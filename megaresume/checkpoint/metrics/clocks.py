"""`Clocks`: the seconds that a process waits for data, and in saves. Costs about 0.3 us per micro-batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Clocks:
    """Counts from the start of the process. One thread writes, any thread reads."""

    def __init__(self) -> None:
        #: seconds for which the training had to wait for micro-batches.
        self.waited = 0.0
        #: the longest of these waits since `take_longest`.
        self.longest = 0.0
        #: seconds for which it stood still for saves.
        self.saving = 0.0

    def wait(self, read: Callable[..., T], *arguments: Any) -> T:
        """Return ``read(*arguments)``, the next micro-batch, and count the time."""
        begin = time.perf_counter()
        try:
            return read(*arguments)
        finally:
            seconds = time.perf_counter() - begin
            self.waited += seconds
            if seconds > self.longest:
                self.longest = seconds

    @contextmanager
    def save(self) -> Iterator[None]:
        """Count a save, as far as the training stands still for it."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.saving += time.perf_counter() - begin

    def take_longest(self) -> float:
        """The longest wait since the last call, in seconds."""
        longest, self.longest = self.longest, 0.0
        return longest
