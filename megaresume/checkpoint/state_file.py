"""The step file: the data state beside a checkpoint, readable without unpickling anything.

An envelope around `StreamState`: which iteration and tag it belongs to, which run wrote it, on which topology.
Sealed as a whole (`megaresume.checkpoint.sealed`), and the state inside carries its own checksum as well.

Version history (raise `VERSION` when a reader of the old version would misunderstand the new):

    1  first version
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaresume.checkpoint.lock import write_fenced
from megaresume.checkpoint.sealed import NewerFormatError, count, read_sealed, seal, text
from megaresume.checkpoint.topology import Topology
from megaresume.stream.errors import StateError
from megaresume.stream.state import VERSION as STREAM_STATE_VERSION
from megaresume.stream.state import StreamState

__all__ = ["FORMAT", "VERSION", "StepFile", "new_id", "read_step_file", "write_step_file"]

FORMAT = "megaresume.step"
VERSION = 1


def new_id() -> str:
    """A new name for a run or a save: 16 hex digits."""
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
    #: the save that wrote it: ties state, manifest and marker of one save together, 16 hex digits.
    save_id: str
    #: UTC, when the save began.
    saved_at: str
    topology: Topology
    state: StreamState

    def to_fields(self) -> dict[str, Any]:
        """Plain JSON, unsealed."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "iteration": self.iteration,
            "tag": self.tag,
            "run": self.run,
            "save_id": self.save_id,
            "saved_at": self.saved_at,
            "topology": self.topology.to_dict(),
            "state": self.state.to_dict(),
        }

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return seal(self.to_fields(), depth=3)


def write_step_file(path: Path, step: StepFile, *, sync_dir: bool = True) -> None:
    """Write atomically, as the owner of the root (see `write_fenced`). Raises CheckpointError."""
    write_fenced(path.parent.parent, path, step.to_bytes(), sync_dir=sync_dir)


def read_step_file(
    path: Path, *, iteration: int | None = None, tag: str | None = None, run: str | None = None
) -> StepFile:
    """Read and check a step file.

    Args:
        path: ``<save>/megaresume/step_0000010.json``.
        iteration: what it must hold, as its name says; None: anything.
        tag: the tag directory that it must belong to; None: anything.
        run: the run that must have written it; None: anything.

    Raises:
        StateError: missing, empty, cut short, damaged, of another kind, of another step or another run.
        NewerFormatError: of a newer version (a StateError as well).
    """
    what = "the data state"
    fields = read_sealed(path, what=what, format_name=FORMAT, version=VERSION, error=StateError)
    inner = fields.get("state")
    inner_version = inner.get("version") if isinstance(inner, Mapping) else None
    if type(inner_version) is int and inner_version > STREAM_STATE_VERSION:
        raise NewerFormatError(
            "the data state was written by a newer megaresume",
            found=f"{path}: state version {inner_version}",
            expected=f"version {STREAM_STATE_VERSION} or older",
            action="upgrade megaresume on this machine to the version that wrote it",
        )
    state = StreamState.from_json(inner)
    try:
        step = StepFile(
            iteration=count(fields["iteration"]),
            tag=text(fields["tag"]),
            run=text(fields["run"]),
            save_id=text(fields["save_id"]),
            saved_at=text(fields["saved_at"]),
            topology=Topology.from_dict(fields["topology"]),
            state=state,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(
            f"{what} lacks a field or has one of the wrong kind",
            found=f"{path}: {type(error).__name__}: {error}",
            expected=f"the fields of version {VERSION}",
            cause="it was written by a faulty program: its checksum is right",
        ) from error
    _check_owner(path, step, iteration=iteration, tag=tag, run=run)
    return step


def _check_owner(path: Path, step: StepFile, *, iteration: int | None, tag: str | None, run: str | None) -> None:
    if iteration is not None and step.iteration != iteration:
        raise StateError(
            "the data state belongs to another step",
            found=f"{path}: iteration {step.iteration}",
            expected=f"iteration {iteration}",
            cause="the file was renamed or copied over another one",
        )
    if run is not None and step.run != run:
        raise StateError(
            "the data state belongs to another run",
            found=f"{path}: run {step.run}, saved {step.saved_at}",
            expected=f"run {run}, as in the ledger of this directory",
            cause="files of two runs were copied into one directory",
            action="load the checkpoint from the directory of the run that wrote it",
        )
    if tag is not None and step.tag != tag:
        raise StateError(
            "the data state belongs to another tag directory",
            found=f"{path}: tag {step.tag}",
            expected=f"tag {tag}",
            cause="a tag directory was renamed, or two programs save the same step into one root",
        )
