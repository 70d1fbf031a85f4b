"""The records of one step beside its model files, all readable without unpickling anything.

    step_0000010.json           the data state: around its envelope, its tag, its run, its topology
    step_0000010.saving.json    the marker: written before the first model file, removed at the end of the commit
    superseded/                 states of steps that were saved again with other data: never overwritten in silence

`DataState` is what a checkpoint must carry so that the data continues; one envelope, whatever the data are:

    {"format": "megaresume.data", "version": 1, "kind": "stream", "framework": "megatron-lm 0.16.1",
     "iteration": 10, "samples": 320, "digest": "0123456789abcdef", "content": {...}, "checksum": "<xxh3_128>"}

    kind      content
    stream    `megaresume.stream.state.StreamState`: a stream of megaresume's
    order     the order of Megatron's own datasets, as the guard recorded it
    loader    what is known of the states of a third-party loader; the states are files beside the checkpoint

The envelope is stored in the same file as the weights, and lies beside the checkpoint in the step file: the two must be
equal. Only a stream is understood here; the others are opaque to this package.

Without the marker two things look alike that are not: a tag directory that a program without megaresume wrote, and one
whose save was killed; a complete checkpoint, and one whose files a second save of the same step is overwriting. And it
tells a commit that was killed before the pointers moved from pointers that somebody moved back on purpose.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from megaresume.checkpoint.lock.lock import write_fenced
from megaresume.checkpoint.records.ledger import EntryKind, LedgerEntry, read_run
from megaresume.checkpoint.records.names import (
    count,
    from_members,
    ledger_path,
    older_dir,
    parse_record_name,
    read_record,
    recorded_tag,
    records_dir,
    seal,
    step_path,
    superseded_path,
    text,
)
from megaresume.checkpoint.system import Topology, boots_up
from megaresume.files import make_dir, write_atomic, write_error
from megaresume.stream.errors import CheckpointError, NewerFormatError, StateError
from megaresume.stream.state import VERSION as STREAM_VERSION
from megaresume.stream.state import StreamState, check_version, open_envelope
from megaresume.stream.state_text import checksum

FORMAT, VERSION = "megaresume.data", 1

Kind = Literal["stream", "order", "loader"]


class DataState(Protocol):
    """The data of a run at one position. Immutable, the same on every rank; equal states continue in the same way."""

    @property
    def kind(self) -> Kind:
        """Whose order of data it is."""

    @property
    def samples(self) -> int:
        """Samples trained, all ranks together: the number of the next sample."""

    @property
    def digest(self) -> str:
        """16 hex digits: of what was trained, or of what says so."""

    def to_dict(self) -> dict[str, Any]:
        """The content, as plain JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpaqueState:
    """A state that is not a stream's; whoever made it reads its content."""

    kind: Literal["order", "loader"]
    samples: int
    digest: str
    content: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """See `DataState`."""
        return dict(self.content)


def stream_of(state: DataState) -> StreamState:
    """The state as that of a stream.

    Raises:
        StateError: it is of another kind; nothing can be planned again from it.
    """
    if isinstance(state, StreamState):
        return state
    if state.kind == "order":
        raise StateError(
            "the run is under guard: its order is verified where it is rebuilt, at every start",
            found=f"the order of Megatron's own datasets, at sample {state.samples}",
            expected="a megaresume stream, which can be planned again without Megatron",
            action="start the run, which says whether it is as recorded; megaresume inspect DIR shows the record",
        )
    raise StateError(
        "the run is trained on a loader of its own, and megaresume does not know its samples",
        found=f"states of a loader, at sample {state.samples}",
        expected="a megaresume stream, which can be planned again",
        action="megaresume inspect DIR shows what is recorded of the loader",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """A data state as it travels inside a checkpoint."""

    state: DataState
    #: optimizer steps done.
    iteration: int
    #: what trained it, and its version: ``megatron-lm 0.16.1``.
    framework: str = "unknown"

    @property
    def kind(self) -> Kind:
        """Whose order of data it is."""
        return self.state.kind

    @property
    def samples(self) -> int:
        """Samples trained."""
        return self.state.samples

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, with the checksum of all of it; the same on every rank."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.state.kind,
            "framework": self.framework,
            "iteration": self.iteration,
            "samples": self.state.samples,
            "digest": self.state.digest,
            "content": self.state.to_dict(),
        }
        return body | {"checksum": checksum(body)}

    def to_text(self) -> str:
        """`to_dict` as ASCII, in one line: containers that hold text alone (Megatron's ``args``) keep it."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)

    @classmethod
    def read(cls, data: object) -> Envelope:
        """Read what `to_dict` or `to_text` wrote.

        Raises:
            StateError: there is nothing, or it is cut short, damaged, of another format, or lacks a field.
            NewerFormatError: intact, and of a later version.
        """
        return open_envelope(data, _envelope, format_name=FORMAT, version=VERSION, texts=str)


def _envelope(body: Mapping[str, Any]) -> Envelope:
    return Envelope(state=_state(body), iteration=count(body["iteration"]), framework=text(body["framework"]))


def _state(body: Mapping[str, Any]) -> DataState:
    kind, samples, digest, content = body["kind"], count(body["samples"]), body["digest"], body["content"]
    if not isinstance(content, Mapping):
        raise ValueError(f"content is {type(content).__name__}, not an object")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{16}", digest):
        raise ValueError(f"digest {digest!r} is not 16 hex digits")
    if kind not in get_args(Kind):
        raise ValueError(f"kind {kind!r} is not one of {', '.join(get_args(Kind))}")
    if kind != "stream":
        return OpaqueState(kind=kind, samples=samples, digest=digest, content=content)
    check_version(content.get("version"), STREAM_VERSION, "the state of the stream")
    state = StreamState.from_json(content)
    if (state.samples, state.digest) != (samples, digest):
        raise ValueError(f"the stream is at sample {state.samples}, digest {state.digest}, not at {samples}, {digest}")
    return state


STEP_FORMAT, STEP_VERSION = "megaresume.step", 1
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
    step = read_record(path, _step, what=what, format_name=STEP_FORMAT, version=STEP_VERSION, error=StateError)
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
        "rename it back; let every program save to a directory of its own",
    )
    for name, of, found, expected, (cause, action) in (
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
                action=action,
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
        """The marker of the save that will write this data state."""
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
        """The file as bytes."""
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
