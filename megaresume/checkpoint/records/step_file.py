"""The step file, ``step_0000010.json``: the data state of one checkpoint, with its tag, its run and its topology.

It is beside the model files and readable without unpickling anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaresume.checkpoint.records.envelope import DataState, Envelope, stream_of
from megaresume.checkpoint.records.ledger import EntryKind, LedgerEntry
from megaresume.checkpoint.records.names import Saved, recorded_tag
from megaresume.checkpoint.records.sealed import from_members, read_record, seal
from megaresume.checkpoint.system import Topology
from megaresume.stream.errors import StateError
from megaresume.stream.state import StreamState

STEP_FORMAT, STEP_VERSION = "megaresume.step", 1


def new_id() -> str:
    """A new id for a run or a save: 16 hex digits."""
    return os.urandom(8).hex()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFile:
    """The data state of one checkpoint, and what it belongs to."""

    #: optimizer steps done.
    iteration: int
    #: name of the tag directory.
    tag: str
    #: the run that wrote it: the same for all checkpoints of one root, 16 hex digits.
    run: str
    #: the save that wrote it: the same in its state, manifest and marker, 16 hex digits.
    save_id: str
    #: UTC, when the save began.
    saved_at: str
    topology: Topology
    state: DataState
    #: the trainer and its version: ``megatron-lm 0.16.1``.
    framework: str = "unknown"

    @property
    def saved(self) -> Saved:
        """The save that wrote it."""
        return Saved(iteration=self.iteration, tag=self.tag, save_id=self.save_id)

    @property
    def stream(self) -> StreamState:
        """The state, for a run on a stream. Raises StateError: see `stream_of`."""
        return stream_of(self.state)

    @property
    def envelope(self) -> Envelope:
        """The state as it is stored with the weights."""
        return Envelope(state=self.state, iteration=self.iteration, framework=self.framework)

    def ledger_entry(self, kind: EntryKind, details: Mapping[str, Any]) -> LedgerEntry:
        """A line about this checkpoint."""
        return LedgerEntry(
            kind=kind,
            iteration=self.iteration,
            tag=self.tag,
            samples=self.state.samples,
            digest=self.state.digest,
            run=self.run,
            time=self.saved_at,
            topology=self.topology,
            details=details,
        )

    def to_fields(self) -> dict[str, Any]:
        """Plain JSON, unsealed."""
        return {
            "format": STEP_FORMAT,
            "version": STEP_VERSION,
            "iteration": self.iteration,
            "tag": self.tag,
            "run": self.run,
            "save_id": self.save_id,
            "saved_at": self.saved_at,
            "topology": self.topology.to_dict(),
            "state": self.envelope.to_dict(),
        }

    def to_bytes(self) -> bytes:
        """The file as bytes."""
        return seal(self.to_fields(), depth=3)


def read_step_file(
    path: Path, *, iteration: int | None = None, tag: str | None = None, run: str | None = None
) -> StepFile:
    """Read and check a step file.

    Args:
        path: ``<save>/megaresume/step_0000010.json``.
        iteration: expected, according to its name; None: any.
        tag: expected tag directory; None: any.
        run: expected; None: any.

    Raises:
        StateError: missing, empty, truncated, damaged, of another kind, of another step or another run.
        NewerFormatError: it has a newer version (also a StateError).
    """
    what = "the data state"
    record = read_record(path, _record, what=what, format_name=STEP_FORMAT, version=STEP_VERSION, error=StateError)
    copied = (
        "the file was renamed or copied over another one",
        "copy it again from where it was saved, under its own name; or load another checkpoint",
    )
    mixed = (
        "files of two runs were copied into one directory",
        "load it from the directory of the run that wrote it",
    )
    renamed = (
        "a tag directory was renamed, or two programs save the same step into one root",
        "rename it back; let every program save to its own directory",
    )
    for name, of, found, expected, (cause, action) in (
        ("iteration", "step", record.iteration, iteration, copied),
        ("run", "run", record.run, run, mixed),
        ("tag", "tag directory", record.tag, tag, renamed),
    ):
        if expected is not None and found != expected:
            raise StateError(
                f"{what} belongs to another {of}",
                found=f"{path}: {name} {found}, saved {record.saved_at}",
                expected=f"{name} {expected}",
                cause=cause,
                action=action,
            )
    return record


def _record(fields: Mapping[str, Any]) -> StepFile:
    envelope = Envelope.read(fields.get("state"))
    if envelope.iteration != fields["iteration"]:
        raise ValueError(f"a state of iteration {envelope.iteration} in a file of iteration {fields['iteration']}")
    inside = {"state": envelope.state, "framework": envelope.framework}
    return from_members(
        StepFile, {**fields, **inside}, tag=recorded_tag, topology=Topology.from_dict, state=lambda state: state
    )
