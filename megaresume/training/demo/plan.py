"""How a demo starts its training program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Attempt", "as_words"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One start of the training program."""

    processes: int
    workers: int
    #: samples.
    micro_batch_size: int
    start_method: str | None = None
    #: fraction of the run's steps after which everything is killed, in the middle of the next step; None: it ends.
    killed_after: float | None = None

    @property
    def layout(self) -> str:
        """In words."""
        processes = f"{self.processes} process" + ("es" if self.processes > 1 else "")
        workers = f"{self.workers} worker" + ("s" if self.workers != 1 else "")
        how = f" ({self.start_method})" if self.start_method else ""
        return f"{processes}, micro-batch {self.micro_batch_size}, {workers}{how}"


def as_words(flags: Mapping[str, object]) -> list[str]:
    """Flags as words of a command line."""
    return [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
