"""`Clocks`: the seconds that a process of a run waits for data, and in saves. About 0.3 us for each micro-batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Clocks:
    """Counts from the start of the process. One thread writes, any thread reads."""

    def __init__(self) -> None:
        #: seconds in which the training had to wait for a micro-batch.
        self.waited = 0.0
        #: of them, the longest wait since `take_longest`.
        self.longest = 0.0
        #: seconds in which it stood still for saves.
        self.saving = 0.0

    def wait(self, read: Callable[..., T], *arguments: Any) -> T:
        """What ``read(*arguments)`` gives, which is the next micro-batch."""
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
        """Around a save, as far as the training stands still for it."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.saving += time.perf_counter() - begin

    def take_longest(self) -> float:
        """The longest wait since this was asked last, in seconds."""
        longest, self.longest = self.longest, 0.0
        return longest
