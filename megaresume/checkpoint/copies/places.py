"""Where copies go: `Place`, a directory or an object store (`store_place`), as the protocol of `stager` needs it.

    hold         make sure that only this job writes there
    announce     a copy begins: its marker
    put_files    complete, verified files; existing ones are not copied again
    put_data     the data config
    commit       data state, manifest, pointers: from here the copy is valid
    conclude     removes its marker
    share_ledger adds missing lines, each at its position
    prune        removes what retention does not keep

`DirectoryPlace` writes into a directory, which requires its lock. The content of a place is read from the directory
`root`, which is a mirror for a store.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from megaresume.checkpoint.lock.lock import (
    check_owned,
    release,
    take,
    write_latest,
    write_manifest,
    write_step_file,
    write_tracker,
)
from megaresume.checkpoint.records.ledger import add_lines, read_ledger
from megaresume.checkpoint.records.manifest import (
    FileEntry,
    Manifest,
    checksum_file,
    list_files,
    read_manifest,
    write_copy,
)
from megaresume.checkpoint.records.marker import Marker, remove_marker, write_marker
from megaresume.checkpoint.records.names import (
    data_path,
    ledger_path,
    manifest_path,
    marker_path,
    records_dir,
    step_path,
)
from megaresume.checkpoint.records.position import share_position, write_position
from megaresume.checkpoint.records.rank_files import remove_orphans
from megaresume.checkpoint.records.step_file import StepFile
from megaresume.checkpoint.save.retention import Retention, keep_superseded, prune
from megaresume.checkpoint.store.store import check_source
from megaresume.files import (
    make_dir,
    read_error,
    remove_leftovers,
    size_of,
    write_atomic,
    write_error,
)
from megaresume.stream.errors import CheckpointError, MegaresumeError


class PartMissingError(Exception):
    """Raised if a checkpoint will not become complete, as another node does not upload its part."""


class Place(Protocol):
    """A place for copies. On rank 0. Every method raises a `MegaresumeError` if the place refuses."""

    #: the directory where its content is read.
    root: Path
    #: for people: a path, or a URL.
    name: str

    def hold(self, local: Path, beat: Callable[[], object]) -> None:
        """Keep other jobs away, and read what is there. Calls ``beat`` while it waits."""

    def release(self) -> None:
        """Allow others to write there."""

    def reopen(self) -> None:
        """Reconnect after an error."""

    def begin(self) -> None:
        """Delete what killed writers left."""

    def check_owned(self) -> None:
        """Raise a CheckpointError if another job has taken it over."""

    def share_ledger(self, local: Path) -> None:
        """Add lines of the local ledger that are missing there."""

    def takes(self, local: Path, iteration: int, tag: str) -> bool:
        """Whether a checkpoint that an earlier process left in a local root can be completed here."""

    def refusal(self, record: StepFile) -> str | None:
        """Why a checkpoint must not be copied; None: it may."""

    def announce(self, record: StepFile, marker: Marker) -> None:
        """Announce that a copy of this save begins, or begins again."""

    def put_files(
        self, local: Path, record: StepFile, manifest: Manifest, gives_way: Callable[[], bool] = lambda: False
    ) -> Manifest:
        """Copy the files of a checkpoint; returns its manifest with the checksums of all files."""

    def put_data(self, data: bytes) -> None:
        """Write the data config."""

    def commit(self, record: StepFile, manifest: Manifest, *, latest: bool, tracker: bool) -> None:
        """Make the copy valid, and move pointers."""

    def conclude(self, record: StepFile) -> None:
        """End the copy."""

    def prune(self, retention: Retention, copied: StepFile, local: Path, waits: Callable[[int, str], bool]) -> None:
        """Delete old copies whose originals are gone. Raises nothing.

        Args:
            retention: which ones to keep.
            copied: the checkpoint that was copied last.
            local: the local root.
            waits: whether a checkpoint there waits, or waited, to be copied.
        """

    def put_position(self, data: bytes) -> None:
        """Write the current position (`position`). In another thread than the other methods."""


class DirectoryPlace:
    """A directory as a place for copies."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        path = os.fspath(root)
        self.root = Path(os.path.abspath(path.removeprefix("file://")))
        self.name = str(self.root)

    def hold(self, local: Path, beat: Callable[[], object]) -> None:
        take(self.root)

    def release(self) -> None:
        release(self.root)

    def reopen(self) -> None:
        pass

    def begin(self) -> None:
        make_dir(records_dir(self.root))
        remove_leftovers(records_dir(self.root))

    def check_owned(self) -> None:
        check_owned(self.root)

    def share_ledger(self, local: Path) -> None:
        share_ledger(local, self.root)

    def takes(self, local: Path, iteration: int, tag: str) -> bool:
        return part_here(local, iteration, tag) is None

    def refusal(self, record: StepFile) -> str | None:
        return None

    def announce(self, record: StepFile, marker: Marker) -> None:
        write_marker(marker_path(self.root, record.iteration, record.tag), marker)

    def put_files(
        self, local: Path, record: StepFile, manifest: Manifest, gives_way: Callable[[], bool] = lambda: False
    ) -> Manifest:
        self._remove_others(self.root / record.tag, manifest)
        copies = [
            tuple(
                replace(entry, checksum=copy_checked(source / entry.path, target / entry.path, entry))
                for entry in entries
            )
            for source, target, entries in (
                (local / record.tag, self.root / record.tag, manifest.files),
                (records_dir(local), records_dir(self.root), manifest.beside),
            )
        ]
        return replace(manifest, files=copies[0], beside=copies[1])

    def _remove_others(self, tag_dir: Path, manifest: Manifest) -> None:
        """Remove files of an older save of the step with another layout."""
        ours = {entry.path for entry in manifest.files}
        try:
            for entry in list_files(tag_dir) if tag_dir.is_dir() else ():
                if entry.path not in ours:
                    os.unlink(tag_dir / entry.path)
        except OSError as error:
            raise write_error(tag_dir, error) from error

    def put_data(self, data: bytes) -> None:
        write_atomic(data_path(self.root), data)

    def commit(self, record: StepFile, manifest: Manifest, *, latest: bool, tracker: bool) -> None:
        keep_superseded(self.root, record)
        write_step_file(step_path(self.root, record.iteration, record.tag), record)
        write_manifest(self.root, manifest)
        if latest:
            write_latest(self.root, record.tag)
        if tracker:
            write_tracker(self.root, record.iteration)

    def conclude(self, record: StepFile) -> None:
        remove_marker(marker_path(self.root, record.iteration, record.tag))

    def prune(self, retention: Retention, copied: StepFile, local: Path, waits: Callable[[int, str], bool]) -> None:
        prune(self.root, retention, copied, copies_of=local)
        remove_orphans(self.root)

    def put_position(self, data: bytes) -> None:
        write_position(self.root, data)


def part_here(root: Path, iteration: int, tag: str) -> Manifest | None:
    """The manifest of a checkpoint of which a local root has only one node's files; None for all others."""
    with contextlib.suppress(MegaresumeError):
        manifest = read_manifest(manifest_path(root, iteration, tag))
        return None if manifest.part is None else manifest
    return None


def missing_lines(source: Path, target: Path) -> list[bytes]:
    """Lines of one ledger from the first one that another lacks: the lines after it show where it belongs."""
    there = {entry.to_bytes() for entry in read_ledger(ledger_path(target)).entries}
    lines = [entry.to_bytes() for entry in read_ledger(ledger_path(source)).entries]
    first = next((number for number, line in enumerate(lines) if line not in there), len(lines))
    return lines[first:]


def share_ledger(source: Path, target: Path) -> None:
    """Add lines that the other ledger lacks, each at its position; a new ledger appears with all lines at once.

    Also copies the recorded position, if that is newer.
    """
    share_position(source, target)
    if missing := missing_lines(source, target):
        add_lines(ledger_path(target), missing)


def copy_checked(source: Path, target: Path, entry: FileEntry) -> str:
    """Copy a file, unless the same bytes already exist.

    Args:
        source: the file.
        target: the copy; its directory is created.
        entry: its size, and its checksum if the save computed one.

    Returns:
        the checksum of both, 32 hex digits.

    Raises:
        CheckpointError: reading or writing fails; the source differs from what was saved; or the copy reads back other
            bytes.
    """
    if size_of(target) == entry.size:  # left by an interrupted copy
        expected = entry.checksum or _checksum(source)
        if _checksum(target) == expected:
            return expected
    make_dir(target.parent)
    written = write_copy(source, target)
    check_source(source, entry, written, os.stat(source).st_size)
    if (found := _checksum(target)) != written:
        raise CheckpointError(
            f"{target} was written and reads back other bytes",
            found=f"checksum {found}",
            expected=f"checksum {written}",
            cause="the shared storage or the network damages data",
            action="it is copied again; look at the storage",
        )
    return written


def _checksum(path: Path) -> str:
    try:
        return checksum_file(path, stored=True)
    except OSError as error:
        raise read_error(path, error) from error
