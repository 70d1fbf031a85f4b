"""`Host` and `Data`: what a `Session` is told by the framework that trains, and by the data that is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megaresume.checkpoint.choose import Choice
from megaresume.checkpoint.data_state import DataState
from megaresume.checkpoint.manifest import FileEntry
from megaresume.checkpoint.topology import Topology

__all__ = ["Data", "Host"]


class Host(Protocol):
    """What trains: DeepSpeed's engine, Megatron, a plain loop. On every rank. See docs/hosts.md."""

    #: its name and version, for records: ``deepspeed 0.18.2``.
    framework: str
    #: for errors: how a load can have been forgotten, how to load (from ``{directory}``), how to load weights alone.
    forgotten: str
    load: str
    begin_anew: str

    def iteration(self) -> int:
        """Optimizer steps made, since the start of the run."""

    def samples(self) -> int:
        """Samples that those steps have trained, all ranks together."""

    def topology(self) -> Topology:
        """How the run is laid out now."""

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str] | None:
        """What this rank writes into a tag directory, relative to it; None: not known beforehand."""

    def settle(self) -> None:
        """Wait until a save that is written in the background is committed. Collective; raises on every rank."""

    def is_saving(self) -> bool:
        """Whether a save is being written in the background."""

    def committed(self, save_dir: Path) -> None:
        """A checkpoint was committed, and the pointers name it. On rank 0."""


class Data(Protocol):
    """What is trained, as the thing whose state a checkpoint carries: a stream, a recorded order, a loader."""

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """A data config that opens the same corpora again; None: nothing of megaresume's opens them."""

    @property
    def changed(self) -> tuple[str, ...]:
        """Why another order begins at this start, as it was accepted: NAME@SAMPLES."""

    def prepare(self) -> None:
        """Before a snapshot of what is trained now: what the ranks have to tell each other. Collective.

        Raises, on every rank:
            StateError: what was handed out and what was trained do not fit, or a step is not over.
        """

    def snapshot(self, samples: int) -> DataState:
        """The state after so many samples, the same on every rank: those trained at the last `prepare`, or those at
        which this process began. No collective; raises on its own."""

    def write_files(self, save_dir: Path, iteration: int, tag: str) -> tuple[FileEntry, ...]:
        """Write what this rank adds to the checkpoint of that snapshot. On every rank; raises on its own."""

    def restore(self, state: DataState, choice: Choice) -> None:
        """Go on from a state. On every rank; raises on its own.

        Raises:
            StateError: it is of another kind, or of other data.
        """

    def describe(self) -> list[str]:
        """What was changed and accepted at the resume, in lines for people."""
