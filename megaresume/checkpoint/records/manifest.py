"""The manifest: every file of a tag directory with its size and, if requested, its checksum.

It is written when all ranks are done and every expected file was seen: **its rename is the moment when a checkpoint
becomes complete**. It names the state that it was committed with, so that neither fits another's. It is written once
more, with checksums, when every file is on the disk: then the checkpoint is **durable** (`durability`).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import xxhash

from megaresume.checkpoint.records.names import Saved, has_stand_ins, rank_file_words, recorded_tag, records_dir
from megaresume.checkpoint.records.sealed import count, flag, from_members, read_record, rows, seal, texts
from megaresume.checkpoint.system import boots_up
from megaresume.files import fsync_dir, fsync_file, open_file, write_all, write_error
from megaresume.stream.errors import CheckpointError, one_line
from megaresume.stream.progress import Progress

FORMAT = "megaresume.manifest"
#: Every megaresume refuses a manifest with a later version than its own, and ignores unknown fields. So a field that
#: older programs may ignore is added without raising this; raise it when an older program would resume wrongly by
#: ignoring a field. The same applies to the step file, the marker, the ledger and the lock.
VERSION = 2
#: the version written for a whole checkpoint, which every megaresume reads.
_VERSION_OF_A_WHOLE = 1
ALGORITHM = "xxh3_128"

#: bytes read at once; so many that hashing takes the time, not the calls.
_CHUNK = 4 << 20

#: most files read concurrently, on a machine with as many cores.
MOST_THREADS = 16

_NUMBER = re.compile(r"[0-9]+")
#: files that frameworks look for by these names, for any rank.
_MODEL_FILE = re.compile(r"_(model|optim)_states\.pt$|\.distcp$")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a tag directory."""

    #: relative to the tag directory, with forward slashes.
    path: str
    #: bytes.
    size: int
    #: xxh3_128, 32 hex digits; None if not computed.
    checksum: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A problem with one file."""

    path: str
    kind: Literal["missing", "size", "checksum", "unreadable", "unlisted"]
    #: with numbers; a sentence without the path.
    detail: str

    def __str__(self) -> str:
        return f"{one_line(self.path)}: {self.detail}"


def list_files(tag_dir: Path) -> tuple[FileEntry, ...]:
    """All files below a tag directory, sorted by path, without checksums.

    Files that network filesystems keep for deleted open files (``.nfs...``) are not part of a checkpoint.

    Raises:
        OSError: the directory cannot be read.
    """
    found: list[FileEntry] = []

    def scan(directory: str, prefix: str) -> None:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith(".nfs"):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    scan(entry.path, f"{prefix}{entry.name}/")
                else:
                    found.append(FileEntry(path=prefix + entry.name, size=entry.stat().st_size))

    scan(os.fspath(tag_dir), "")
    return tuple(sorted(found, key=lambda entry: entry.path))


def directories_of_models(root: Path) -> list[str]:
    """Directories in a root with files that frameworks would take for a model's, by name; skips hidden ones."""

    def names(directory: Path) -> list[str]:
        try:
            return sorted(os.listdir(directory))
        except OSError:  # a file, or not accessible
            return []

    return [
        name for name in names(root) if name[0] != "." and any(_MODEL_FILE.search(file) for file in names(root / name))
    ]


def checksum_file(path: str | os.PathLike[str], progress: Progress | None = None, *, stored: bool = False) -> str:
    """xxh3_128 of a file, 32 hex digits; hashing and reading release the GIL. Raises OSError.

    ``stored``: from the storage rather than this machine's page cache, if the system can do that.
    """
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    with open_file(path) as file:
        if stored:
            with contextlib.suppress(OSError, AttributeError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
            if progress is not None:
                progress(size)
    return digest.hexdigest()


def checksum_files(
    tag_dir: Path, paths: Iterable[str], *, progress: Progress | None = None
) -> dict[str, str | OSError]:
    """Checksum files in parallel; hashing and reading release the GIL.

    Args:
        tag_dir: the base of the paths.
        paths: the files.
        progress: called with the bytes just read, from several threads.

    Returns:
        path -> 32 hex digits of xxh3_128, or the error in reading it.
    """
    from concurrent.futures import ThreadPoolExecutor  # only here: half of `inspect`'s import time

    def one(path: str) -> str | OSError:
        try:
            return checksum_file(os.path.join(tag_dir, path), progress)
        except OSError as error:
            return error

    names = list(paths)
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        try:
            found = pool.map(one, names)
        except RuntimeError:  # no new threads while Python exits, which waits until the last checkpoint is durable
            found = map(one, names)
        return dict(zip(names, found, strict=True))


def write_copy(source: Path, target: Path) -> str:
    """Copy a file and force it to the disk; returns the checksum of the copy. Raises CheckpointError."""
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    try:
        with open_file(source) as file:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                while size := file.readinto(buffer):
                    hasher.update(buffer[:size])
                    write_all(descriptor, buffer[:size])
                fsync_file(descriptor)
            finally:
                os.close(descriptor)
        fsync_dir(target.parent)
    except OSError as error:
        raise write_error(target, error) from error
    return hasher.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of a complete checkpoint."""

    iteration: int
    tag: str
    #: the save that wrote it, as in the step file.
    save_id: str
    #: digest of the data state that was committed with it.
    digest: str
    files: tuple[FileEntry, ...]
    #: files of the same save that each rank added, relative to ``<save>/megaresume``; always with checksums.
    beside: tuple[FileEntry, ...] = ()

    #: whether every file is on the disk, so that it survives machines going down.
    durable: bool = True
    #: boots of the machines that wrote it, while it is not durable.
    boots: tuple[str, ...] = ()
    #: (number, of how many): these are the files of one node, and the others are on the disks of other nodes; None:
    #: these are all files.
    part: tuple[int, int] | None = None

    @property
    def saved(self) -> Saved:
        """The save that wrote it."""
        return Saved(iteration=self.iteration, tag=self.tag, save_id=self.save_id)

    @property
    def is_of_rank_0(self) -> bool:
        """Whether the files are those of the node with the ledger."""
        return self.part is None or self.part[0] == 0

    @property
    def is_safe(self) -> bool:
        """Whether its files have what was written: on disk, or in the memory of machines that have all stayed up."""
        return self.durable or (bool(self.boots) and boots_up().issuperset(self.boots))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in (*self.files, *self.beside))

    @property
    def has_checksums(self) -> bool:
        """Whether every file has a checksum."""
        return all(entry.checksum is not None for entry in self.files)

    def to_bytes(self) -> bytes:
        """The content of the file."""
        fields: dict[str, Any] = {
            "format": FORMAT,
            "version": _VERSION_OF_A_WHOLE if self.part is None else VERSION,
            "iteration": self.iteration,
            "tag": self.tag,
            "save_id": self.save_id,
            "digest": self.digest,
            "durable": self.durable,
            "boots": list(self.boots),
            **({} if self.part is None else {"part": list(self.part)}),
            "algorithm": ALGORITHM,
            "files": [[entry.path, entry.size, entry.checksum] for entry in self.files],
            "beside": [[entry.path, entry.size, entry.checksum] for entry in self.beside],
        }
        return seal(fields, depth=2)

    def verify(
        self,
        tag_dir: Path,
        *,
        mode: Literal["sizes", "checksums"] = "sizes",
        progress: Progress | None = None,
    ) -> list[Problem]:
        """Compare the files on disk with the manifest.

        Unknown files are fine, as programs add their own after the save; except for files that by their names are model
        or optimizer files of other ranks (`unlisted`), which frameworks would read.

        Args:
            tag_dir: the tag directory.
            mode: ``checksums`` reads every file that has one; ``sizes`` takes one look-up per file. Files in ``beside``
                are small, and are always read, if a store's mirror has them.
            progress: see `checksum_files`.

        Returns:
            the problems, in the order of the manifest; empty: none.
        """
        found = verify_files(tag_dir, self.files, mode=mode, progress=progress)
        return found + _unlisted_problems(tag_dir, self.files) + self.verify_beside(tag_dir.parent)

    def verify_beside(self, root: Path) -> list[Problem]:
        """Compare the files in ``<root>/megaresume`` with the manifest, including checksums: see `verify`."""
        if not self.beside:
            return []
        found = verify_files(records_dir(root), self.beside, mode="sizes" if has_stand_ins(root) else "checksums")
        place = records_dir(root).name
        return [replace(p, path=f"{place}/{p.path}", detail=f"{rank_file_words(p.path)} {p.detail}") for p in found]


def verify_files(
    directory: Path,
    files: tuple[FileEntry, ...],
    *,
    mode: Literal["sizes", "checksums"],
    progress: Progress | None = None,
) -> list[Problem]:
    """Problems with these files of a directory only; arguments as for `Manifest.verify`."""
    problems: dict[str, Problem] = {}
    for entry in files:
        problem = _size_problem(directory, entry)
        if problem is not None:
            problems[entry.path] = problem
    if mode == "checksums":
        checked = {e.path: e for e in files if e.checksum is not None and e.path not in problems}
        actual = checksum_files(directory, checked, progress=progress)
        for path, checksum in actual.items():
            if isinstance(checksum, OSError):
                detail = f"cannot be read: {checksum.strerror or checksum}"
                problems[path] = Problem(path=path, kind="unreadable", detail=detail)
            elif checksum != checked[path].checksum:
                detail = f"checksum is {checksum}, was {checked[path].checksum} when it was saved"
                problems[path] = Problem(path=path, kind="checksum", detail=detail)
    return [problems[entry.path] for entry in files if entry.path in problems]


def _unlisted_problems(tag_dir: Path, files: tuple[FileEntry, ...]) -> list[Problem]:
    try:
        there = [entry.path for entry in list_files(tag_dir)]
    except OSError:
        return []  # then every listed file is missing or unreadable
    listed = [entry.path for entry in files]
    names = {path for path in there if _MODEL_FILE.search(path)} - set(listed) | set(unlisted(there, listed))
    detail = "the manifest does not name it: it is a file of other ranks, or of another save"
    return [Problem(path=path, kind="unlisted", detail=detail) for path in sorted(names)]


def unlisted(there: Iterable[str], listed: Iterable[str]) -> list[str]:
    """Paths that differ from a listed one only in numbers, as the files of two ranks do."""
    known = set(listed)
    patterns = {_NUMBER.sub("0", path) for path in known if _NUMBER.search(path)}
    return sorted(path for path in there if path not in known and _NUMBER.sub("0", path) in patterns)


def _size_problem(tag_dir: Path, entry: FileEntry) -> Problem | None:
    try:
        size = os.stat(os.path.join(tag_dir, entry.path)).st_size
    except (FileNotFoundError, NotADirectoryError):
        return Problem(path=entry.path, kind="missing", detail=f"is missing, had {entry.size} bytes")
    except OSError as error:
        return Problem(path=entry.path, kind="unreadable", detail=f"cannot be read: {error.strerror or error}")
    if size != entry.size:
        detail = f"has {size} bytes, had {entry.size} when it was saved"
        return Problem(path=entry.path, kind="size", detail=detail)
    return None


def read_manifest(path: Path, *, iteration: int | None = None, tag: str | None = None) -> Manifest:
    """Read and check a manifest.

    Args:
        path: ``<save>/megaresume/step_0000010.manifest.json``.
        iteration: expected; None: any.
        tag: expected; None: any.

    Raises:
        CheckpointError: missing, empty, truncated, damaged, of another kind or of another checkpoint.
        NewerFormatError: it has a newer version.
    """
    what = "the manifest"
    manifest = read_record(path, _manifest, what=what, format_name=FORMAT, version=VERSION, error=CheckpointError)
    for name, found, expected in (("iteration", manifest.iteration, iteration), ("tag", manifest.tag, tag)):
        if expected is not None and found != expected:
            raise CheckpointError(
                f"{what} belongs to another checkpoint",
                found=f"{path}: {name} {found}",
                expected=f"{name} {expected}",
                cause="the file was renamed or copied over another one",
                action="copy it again from where it was saved, under its own name; or load another checkpoint",
            )
    return manifest


def _manifest(fields: Mapping[str, Any]) -> Manifest:
    if fields["algorithm"] != ALGORITHM:
        raise ValueError(f"checksums by {fields['algorithm']!r}, not {ALGORITHM}")
    readers = {"tag": recorded_tag, "files": file_entries, "beside": file_entries, "durable": flag, "boots": texts}
    return from_members(Manifest, {"part": None, **fields}, **readers, part=_part)


def _part(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    node, nodes = map(count, rows(value))
    if node >= nodes:
        raise ValueError(f"{value!r} is not a part")
    return node, nodes


def file_entries(value: object) -> tuple[FileEntry, ...]:
    """A list of files. Raises ValueError or TypeError for anything else."""
    return tuple(map(file_entry, rows(value)))


def file_entry(row: Any) -> FileEntry:
    """One of ``[path, size, checksum]``. Raises ValueError or TypeError for anything else."""
    path, size, checksum = rows(row)
    if not isinstance(path, str) or not path or PurePosixPath(path).is_absolute() or ".." in path.split("/"):
        raise ValueError(f"{path!r} is not a path below the tag directory")
    if b"\0" in os.fsencode(path):
        raise ValueError(f"{path!r} cannot be the path of a file")
    if checksum is not None and not isinstance(checksum, str):
        raise ValueError(f"{checksum!r} is not a checksum")
    return FileEntry(path=path, size=count(size), checksum=checksum)
