"""What is written about one step besides its files: its data state, the marker of its save, and what a later save of it
replaced. All of it readable without unpickling anything.

    step_0000010.json           the data state: around its envelope (`data_state`), its tag, its run, its topology
    step_0000010.saving.json    the marker: written before the first model file, removed at the end of the commit
    superseded/                 states of steps that were saved again with other data: never overwritten in silence

Without the marker two things look alike that are not: a tag directory that a program without megaresume wrote, and one
whose save was killed; a complete checkpoint, and one whose files a second save of the same step is overwriting. And it
tells a commit that was killed before the pointers moved from pointers that somebody moved back on purpose.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaresume.checkpoint.data_state import DataState, Envelope, stream_of
from megaresume.checkpoint.formats import from_members, read_record, seal
from megaresume.checkpoint.ledger import EntryKind, LedgerEntry, read_run
from megaresume.checkpoint.lock import write_fenced
from megaresume.checkpoint.paths import (
    ledger_path,
    older_dir,
    parse_record_name,
    recorded_tag,
    records_dir,
    step_path,
    superseded_path,
)
from megaresume.checkpoint.system import boots_up
from megaresume.checkpoint.topology import Topology
from megaresume.files import make_dir, write_atomic, write_error
from megaresume.stream.errors import CheckpointError, NewerFormatError, StateError
from megaresume.stream.state import StreamState

FORMAT, VERSION = "megaresume.step", 1
MARKER_FORMAT, MARKER_VERSION = "megaresume.saving", 1


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
    state: DataState
    #: what trained it, and its version: ``megatron-lm 0.16.1``.
    framework: str = "unknown"

    @property
    def stream(self) -> StreamState:
        """The state, of a run on a stream. Raises StateError: see `stream_of`."""
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
            "format": FORMAT,
            "version": VERSION,
            "iteration": self.iteration,
            "tag": self.tag,
            "run": self.run,
            "save_id": self.save_id,
            "saved_at": self.saved_at,
            "topology": self.topology.to_dict(),
            "state": self.envelope.to_dict(),
        }

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return seal(self.to_fields(), depth=3)


def write_step_file(path: Path, step: StepFile) -> None:
    """Write atomically, as the owner of the root (see `write_fenced`); durable with the manifest, which is written next
    into the same directory. Raises CheckpointError."""
    write_fenced(path.parent.parent, path, step.to_bytes(), sync_dir=False)


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
    step = read_record(path, _step, what=what, format_name=FORMAT, version=VERSION, error=StateError)
    copied = "the file was renamed or copied over another one"
    mixed = "files of two runs were copied into one directory: load it from the directory of the run that wrote it"
    renamed = "a tag directory was renamed, or two programs save the same step into one root"
    for name, of, found, expected, cause in (
        ("iteration", "step", step.iteration, iteration, copied),
        ("run", "run", step.run, run, mixed),
        ("tag", "tag directory", step.tag, tag, renamed),
    ):
        if expected is not None and found != expected:
            raise StateError(
                f"{what} belongs to another {of}",
                found=f"{path}: {name} {found}, saved {step.saved_at}",
                expected=f"{name} {expected}",
                cause=cause,
            )
    return step


def _step(fields: Mapping[str, Any]) -> StepFile:
    envelope = Envelope.read(fields.get("state"))
    if envelope.iteration != fields["iteration"]:
        raise ValueError(f"a state of iteration {envelope.iteration} in a file of iteration {fields['iteration']}")
    inside = {"state": envelope.state, "framework": envelope.framework}
    return from_members(
        StepFile, {**fields, **inside}, tag=recorded_tag, topology=Topology.from_dict, state=lambda state: state
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """A save that has begun."""

    iteration: int
    tag: str
    #: the save; its state and manifest will have the same, 16 hex digits.
    save_id: str
    #: the run, 16 hex digits.
    run: str
    #: UTC.
    began_at: str
    #: which pointers this save will move.
    latest: bool
    tracker: bool
    #: of the machines that write it (`system.boot_id`); empty: not known.
    boots: tuple[str, ...] = ()

    @classmethod
    def of(cls, step: StepFile, *, latest: bool, tracker: bool, boots: Iterable[str] = ()) -> Marker:
        """Of the save that will write this data state."""
        return cls(
            iteration=step.iteration,
            tag=step.tag,
            save_id=step.save_id,
            run=step.run,
            began_at=step.saved_at,
            latest=latest,
            tracker=tracker,
            boots=tuple(sorted(boots)),
        )

    @property
    def is_safe(self) -> bool:
        """Whether what was written is on the disk, or in the memory of machines that are all up since."""
        return not self.boots or boots_up().issuperset(self.boots)

    def to_bytes(self) -> bytes:
        """The content of the file."""
        return seal({"format": MARKER_FORMAT, "version": MARKER_VERSION, **asdict(self)}, depth=1)


def write_marker(path: Path, marker: Marker) -> None:
    """Write atomically. Raises CheckpointError."""
    write_atomic(path, marker.to_bytes())


def read_marker(path: Path) -> Marker | None:
    """Read a marker; None if there is none.

    Raises:
        CheckpointError: damaged.
        NewerFormatError: of a newer version.
    """
    if not path.exists():
        return None
    return read_record(
        path,
        lambda fields: from_members(Marker, fields, tag=recorded_tag),
        what="the save marker",
        format_name=MARKER_FORMAT,
        version=MARKER_VERSION,
        error=CheckpointError,
    )


def remove_marker(path: Path) -> None:
    """Remove a marker; no error if there is none. Raises CheckpointError.

    Not made durable: one that a power cut brings back beside its own manifest changes nothing.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise write_error(path, error) from error


def keep_superseded(root: Path, step: StepFile) -> tuple[str, ...]:
    """Copy the state of the same step if it is of other data: a step's history is never lost in silence."""
    path = step_path(root, step.iteration, step.tag)
    if (aside := older_dir(root, step.iteration, step.tag) / path.relative_to(root)).exists():
        path = aside
    if not path.exists():
        return ()
    try:
        old = read_step_file(path)
        digest, what = old.state.digest, f"digest {old.state.digest}, saved {old.saved_at}"
        if digest == step.state.digest and old.tag == step.tag:
            return ()
    except NewerFormatError:
        raise
    except StateError as error:
        digest, what = "unreadable", f"an unreadable state ({error.headline})"
    keep = superseded_path(root, step.iteration, step.tag, digest)
    make_dir(keep.parent)
    try:
        write_atomic(keep, path.read_bytes(), drafts=records_dir(root))
    except OSError as error:
        raise write_error(keep, error) from error
    return (
        f"iteration {step.iteration} was committed before with other data: {what}; now digest {step.state.digest}. "
        f"The old state is kept as {keep.relative_to(root)}",
    )


def run_of(root: Path) -> str | None:
    """The run that a checkpoint root belongs to: from the ledger, or else from its newest readable record."""
    run = read_run(ledger_path(root))
    if run is not None:
        return run
    try:
        names = sorted(os.listdir(records_dir(root)), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    for name in names:
        record = parse_record_name(name)
        try:
            if record is not None and record.kind == "state":
                return read_step_file(records_dir(root) / name).run
            if record is not None and record.kind == "saving":
                marker = read_marker(records_dir(root) / name)
                if marker is not None:
                    return marker.run
        except NewerFormatError:
            raise
        except (StateError, CheckpointError):
            continue
    return None
