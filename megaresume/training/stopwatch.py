"""The seconds that a rank spends on its data, added up."""

from __future__ import annotations

import functools
import time
from types import TracebackType
from typing import Any

__all__ = ["Stopwatch"]


class Stopwatch:
    """Runs within its ``with`` statements, and within the methods that it watches."""

    def __init__(self) -> None:
        #: so far.
        self.seconds = 0.0
        self._began = 0.0

    def watch(self, thing: Any, method: str) -> None:
        """Count every call of a method of this one object."""
        call = getattr(thing, method)

        @functools.wraps(call)
        def timed(*args: Any, **more: Any) -> Any:
            with self:
                return call(*args, **more)

        setattr(thing, method, timed)

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - self._began
