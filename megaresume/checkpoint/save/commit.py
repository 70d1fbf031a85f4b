"""The save protocol, on rank 0: `begin_save` before the first model file, `commit_save` when all ranks are done.

    make_room       an existing save of the same step is moved aside (`retention`)
    begin_save      still the owner of the root?
                    marker                    step_0000010.saving.json
                    ... all ranks write their model files, barrier ...
    commit_save     still the owner? every expected file there, none of 0 bytes?
                    data state                step_0000010.json
                    manifest, not durable     step_0000010.manifest.json    <- from here the checkpoint is complete
                    latest, tracker
                    ledger line
                    marker removed            <- from here its commit is finished
    in the background (`durability`)
                    every file forced to the disk, and its checksum computed unless the commit did so
                    manifest, durable         step_0000010.manifest.json    <- from here it survives a power cut
                    ledger line
                    the older save of the same step removed, old checkpoints pruned

Each step is atomic and durable before the next begins. A kill between any two leaves either the previous checkpoint or
this one, never a mixture; the next run's `record_start` finishes a commit that was interrupted after the manifest.
State, manifest and pointers are written in a way that only the owner of the root can (`lock`).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from megaresume.checkpoint import system
from megaresume.checkpoint.lock.lock import check_owned, write_latest, write_manifest, write_step_file, write_tracker
from megaresume.checkpoint.records.candidates import run_of
from megaresume.checkpoint.records.envelope import DataState
from megaresume.checkpoint.records.ledger import append_ledger, last_start, with_attempt
from megaresume.checkpoint.records.manifest import FileEntry, Manifest, checksum_file, list_files, unlisted
from megaresume.checkpoint.records.marker import Marker, read_marker, remove_marker, write_marker
from megaresume.checkpoint.records.names import (
    TRACKER,
    check_tag,
    data_path,
    ledger_path,
    manifest_path,
    marker_path,
    megatron_tag,
    records_dir,
    step_path,
)
from megaresume.checkpoint.records.pointers import read_pointer
from megaresume.checkpoint.records.step_file import StepFile, new_id
from megaresume.checkpoint.save.retention import keep_superseded, put_back
from megaresume.checkpoint.system import Topology, utc
from megaresume.files import make_dir, read_error, size_of, write_atomic, write_error
from megaresume.stream.errors import CheckpointError, UsageError, listed


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingCheckpoint:
    """A save that has begun, with everything that will be written about it, as it was at that moment.

    Only plain values: it may be kept until an asynchronous save is done, or sent to the process that finishes it.
    """

    #: the checkpoint root.
    save_dir: Path
    record: StepFile
    #: which pointers the commit moves, and which machines write.
    marker: Marker
    #: when the save began, in seconds since 1970.
    began: float

    @property
    def tag_dir(self) -> Path:
        """The tag directory."""
        return self.save_dir / self.record.tag


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """The changes made by a commit."""

    record: StepFile
    manifest: Manifest
    #: notes for the user: sentences.
    notes: tuple[str, ...]


def begin_save(
    save_dir: str | os.PathLike[str],
    *,
    tag: str,
    iteration: int,
    state: DataState,
    framework: str = "unknown",
    topology: Topology | None = None,
    latest: bool = True,
    tracker: bool = True,
    boots: Iterable[str] | None = None,
) -> PendingCheckpoint:
    """Announce a save and capture its values. On rank 0, before any rank writes a model file.

    If the tag directory already exists (the same step saved a second time), call `retention.make_room` first, and put a
    barrier between this and the first write of any rank. Otherwise the checkpoint is invalid from here on, and the
    existing files become part of this one.

    Args:
        save_dir: the checkpoint root; created if necessary.
        tag: name of the tag directory.
        iteration: optimizer steps done.
        state: of the data as trained so far.
        framework: the trainer and its version.
        topology: the layout of the run.
        latest: whether the commit moves DeepSpeed's ``latest``.
        tracker: whether it moves Megatron's tracker. False if Megatron moves it itself.
        boots: of the machines that will write it (`system.boot_id`); None: only this one.

    Raises:
        UsageError: impossible tag or negative iteration.
        CheckpointError: the directory cannot be written, or has another owner by now.
        StateError: the root was written by a newer megaresume.
    """
    check_tag(tag)
    if iteration < 0:
        raise UsageError(
            "an iteration cannot be negative",
            found=iteration,
            expected="0 or more",
            action="pass the number of steps that were trained",
        )
    root = Path(os.path.abspath(save_dir))
    make_dir(records_dir(root))
    check_owned(root)
    began = time.time()
    record = StepFile(
        iteration=iteration,
        tag=tag,
        run=run_of(root) or new_id(),
        save_id=new_id(),
        saved_at=utc(began),
        topology=topology or Topology(),
        state=state,
        framework=framework,
    )
    boots = [system.boot_id()] if boots is None else boots
    marker = Marker.of(record, latest=latest, tracker=tracker, boots=boots)
    write_marker(marker_path(root, iteration, tag), marker)
    return PendingCheckpoint(save_dir=root, record=record, marker=marker, began=began)


def commit_save(
    pending: PendingCheckpoint,
    *,
    expected_files: Iterable[str] | None = None,
    beside: Iterable[FileEntry] = (),
    origin: Mapping[str, Any] | None = None,
    sum_bytes: int = 0,
    part: tuple[int, int] | None = None,
) -> Commit:
    """Commit a save. On rank 0, after the barrier that follows the last model file (or in the finalizer).

    Then it is complete, but not yet durable: see `durability`.

    Args:
        pending: the result of `begin_save`.
        expected_files: files that must exist, relative to the tag directory; None: at least one that is not empty.
        beside: files of this save in ``<save>/megaresume``, with checksums; they are part of the checkpoint.
        origin: a data config that opens the same corpora again, for ``<save>/megaresume/data.yaml``.
        sum_bytes: checksum this many bytes now, the smallest files first; the rest later.
        part: the part of this node, if every node has its own directory: see `Manifest.part`.

    Raises:
        CheckpointError: expected files are missing or empty (names them; the pointers are unchanged), another save of
            the same step has begun since, the root has another owner by now, or a write fails.
    """
    root, record = pending.save_dir, pending.record
    check_owned(root)
    _check_not_overtaken(pending)
    if part is not None and expected_files is None:
        expected_files = ()  # a node may have nothing to save
    files = _with_checksums(pending.tag_dir, _collect(pending.tag_dir, expected_files), sum_bytes)
    others = tuple(beside)
    _check_beside(root, record.tag, others)
    notes = keep_superseded(root, record)
    manifest = Manifest(
        iteration=record.iteration,
        tag=record.tag,
        save_id=record.save_id,
        digest=record.state.digest,
        files=files,
        beside=others,
        durable=False,
        boots=pending.marker.boots,
        part=part,
    )
    # One fsync of the directory for both: if a power cut loses only the state, the manifest reveals it.
    write_step_file(step_path(root, record.iteration, record.tag), record)
    write_manifest(root, manifest)
    seconds = time.time() - pending.began
    if origin is not None:
        write_data_config(root, origin)
    publish(root, record, manifest, pending.marker, seconds=seconds, notes=notes)
    return Commit(record=record, manifest=manifest, notes=notes)


def join_save(pending: PendingCheckpoint) -> None:
    """Announce a save in the directory of another node than rank 0's. By the leading rank of the node.

    Args:
        pending: the result of `begin_save` on rank 0, with the directory of this node and the boots of its machine.

    Raises:
        CheckpointError: it cannot be written, or has another owner by now.
    """
    root, record = pending.save_dir, pending.record
    check_owned(root)
    make_dir(records_dir(root))
    write_marker(marker_path(root, record.iteration, record.tag), pending.marker)
    make_dir(pending.tag_dir)


def abandon_save(root: Path, *, iteration: int, tag: str) -> None:
    """Delete what a failed save has written, and restore an older save of its step. On rank 0, when no rank writes.
    Keeps what is committed, or named by Megatron's tracker, which Megatron moves before our commit.

    Raises:
        CheckpointError: a write fails.
    """
    put_back(root)
    if manifest_path(root, iteration, tag).exists() or (
        tag == megatron_tag(iteration) and read_pointer(root, TRACKER).iteration == iteration
    ):
        return
    try:
        if (root / tag).is_dir():
            shutil.rmtree(root / tag)
    except OSError as error:
        raise write_error(root / tag, error) from error
    remove_marker(marker_path(root, iteration, tag))


def publish(
    root: Path,
    record: StepFile,
    manifest: Manifest,
    marker: Marker,
    *,
    seconds: float | None = None,
    notes: tuple[str, ...] = (),
    is_recorded: bool = False,
) -> None:
    """The second half of a commit: pointers, ledger line, marker. The manifest must have been written.

    Args:
        root: the checkpoint root.
        step: the state that was committed.
        manifest: its manifest.
        marker: of the save: which pointers to move.
        seconds: duration of the save; None if unknown.
        notes: for the ledger.
        is_recorded: whether the ledger already has its line.
    """
    if marker.latest:
        write_latest(root, record.tag)
    if marker.tracker:
        write_tracker(root, record.iteration)
    if not is_recorded:
        record_commit(root, record, manifest, seconds=seconds, notes=notes)
    remove_marker(marker_path(root, record.iteration, record.tag))


def record_commit(
    root: Path, record: StepFile, manifest: Manifest, *, seconds: float | None = None, notes: tuple[str, ...] = ()
) -> None:
    """The ledger line of a commit: see `publish`."""
    details: dict[str, object] = {
        "save_id": record.save_id,
        "files": len(manifest.files),
        "bytes": manifest.size,
    }
    if (start := last_start(ledger_path(root))) is not None:
        details["start"] = start
    if seconds is not None:
        details["save_seconds"] = round(max(seconds, 0.0), 3)
    if notes:
        details["notes"] = list(notes)
    if manifest.is_of_rank_0:
        append_ledger(ledger_path(root), record.ledger_entry("checkpoint", with_attempt(details)))


def _check_not_overtaken(pending: PendingCheckpoint) -> None:
    record = pending.record
    path = marker_path(pending.save_dir, record.iteration, record.tag)
    marker = read_marker(path)
    if marker is None or marker.save_id != record.save_id:
        raise CheckpointError(
            f"another save of {record.tag} has begun or ended since this one began; this one is not committed",
            found="no save marker" if marker is None else f"a save that began {marker.began_at}",
            expected=f"the marker of the save that began {record.saved_at}: {path}",
            cause="two jobs save into one directory, or a finalizer ran twice",
            action="let every job save to its own directory",
        )


def _collect(tag_dir: Path, expected: Iterable[str] | None) -> tuple[FileEntry, ...]:
    """The files of the tag directory; raises CheckpointError if an expected one is missing or empty."""
    try:
        files = list_files(tag_dir)
    except (FileNotFoundError, NotADirectoryError):
        files = ()
    except OSError as error:
        raise read_error(tag_dir, error) from error
    sizes = {entry.path: entry.size for entry in files}
    if expected is None:
        if not any(sizes.values()):
            _refuse(tag_dir.name, tag_dir, ["no file that is not empty"], "at least one file with content")
        return files
    wanted = [str(PurePosixPath(name)) for name in expected]
    wrong = [f"{name} is missing" for name in wanted if name not in sizes]
    wrong += [f"{name} has 0 bytes" for name in wanted if sizes.get(name) == 0]
    wrong += [f"{name} is there, but no rank of this save writes it" for name in unlisted(sizes, wanted)]
    if wrong:
        _refuse(tag_dir.name, tag_dir, wrong, f"{len(wanted)} files that are not empty")
    return files


def _with_checksums(tag_dir: Path, files: tuple[FileEntry, ...], most: int) -> tuple[FileEntry, ...]:
    """The same files, with checksums of the smallest ones up to ``most`` bytes in all."""
    sums: dict[str, str] = {}
    for entry in sorted(files, key=lambda entry: entry.size):
        most -= entry.size
        if most < 0:
            break
        try:
            sums[entry.path] = checksum_file(tag_dir / entry.path)
        except OSError:  # retried later, and reported then
            continue
    return tuple(replace(entry, checksum=sums.get(entry.path)) for entry in files)


def _check_beside(root: Path, tag: str, entries: tuple[FileEntry, ...]) -> None:
    sizes = [(entry, size_of(records_dir(root) / entry.path)) for entry in entries]
    wrong = [
        f"{entry.path} is missing" if size is None else f"{entry.path} has {size} of {entry.size} bytes"
        for entry, size in sizes
        if size != entry.size
    ]
    if wrong:
        _refuse(tag, records_dir(root), wrong, f"{len(entries)} files as they were written")


def _refuse(tag: str, place: Path, wrong: list[str], expected: str) -> None:
    raise CheckpointError(
        f"the checkpoint {tag} is incomplete and was not committed; the pointers stay as they were",
        found=f"{place}: {listed(wrong, 10)}",
        expected=expected,
        cause="a rank was killed or ran out of disk while saving, or saves to another directory than rank 0; or the "
        "ranks of another job still write there",
        action="look at the logs of the ranks that own these files; every rank must see the same "
        "directory of checkpoints",
    )


_DATA_CONFIG = "# The data of this run, as it was last saved. Written by megaresume; corpora may move.\n"


def write_data_config(root: Path, origin: Mapping[str, Any]) -> None:
    """Write a normal data config, so that ``megaresume stream`` can show the run's samples; unless it is unchanged."""
    import yaml

    # libyaml takes a fifth of the time: training waits for this, with thousands of sources for a second.
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    path = data_path(root)
    content = (_DATA_CONFIG + yaml.dump(_plain(origin), Dumper=dumper, sort_keys=False, allow_unicode=True)).encode()
    try:
        if path.read_bytes() == content:
            return
    except OSError:
        pass  # missing, or unreadable: writing will show
    write_atomic(path, content)


def _plain(value: Any) -> Any:
    """A value without aliases and classes, which safe YAML cannot write."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
