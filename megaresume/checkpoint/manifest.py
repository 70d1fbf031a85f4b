"""The manifest: every file of a tag directory with its size and, if asked for, its checksum.

It is written when all ranks are done and every expected file was seen: **its rename is the moment at which a
checkpoint counts as complete**. It names the state that it was committed with, so that neither fits another's.

Version history:

    1  first version
    2  ``beside``: files of the same save in ``<save>/megaresume``. Written only where there are any: a reader of
       version 1 would take a checkpoint without them for a whole one
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import xxhash

from megaresume.checkpoint.layout import rank_file_words, records_dir
from megaresume.checkpoint.sealed import count, read_sealed, rows, seal, text
from megaresume.stream.errors import CheckpointError

__all__ = ["FORMAT", "VERSION", "FileEntry", "Manifest", "Problem", "checksum_files", "list_files", "read_manifest"]

FORMAT = "megaresume.manifest"
VERSION = 2
ALGORITHM = "xxh3_128"

#: bytes read at once; large enough that hashing, not the calls, is what costs.
_CHUNK = 4 << 20

Progress = Callable[[int], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a tag directory."""

    #: relative to the tag directory, with forward slashes.
    path: str
    #: bytes.
    size: int
    #: xxh3_128, 32 hex digits; None: not taken.
    checksum: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What is wrong with one file."""

    path: str
    kind: Literal["missing", "size", "checksum", "unreadable"]
    #: with numbers; a sentence without the path.
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}"


def list_files(tag_dir: Path) -> tuple[FileEntry, ...]:
    """All files below a tag directory, in order of their paths, without checksums.

    Files that network filesystems keep for deleted open files (``.nfs...``) are no part of a checkpoint.

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


def _checksum(path: str, progress: Progress | None) -> str:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
            if progress is not None:
                progress(size)
    return digest.hexdigest()


def checksum_files(
    tag_dir: Path, paths: Iterable[str], *, threads: int | None = None, progress: Progress | None = None
) -> dict[str, str | OSError]:
    """Checksum files in parallel; hashing and reading release the interpreter lock.

    Args:
        tag_dir: what the paths are relative to.
        paths: the files.
        threads: at the same time; None: one a core, at most 16.
        progress: called with the bytes just read, from several threads.

    Returns:
        by path: 32 hex digits of xxh3_128, or the error that reading gave.
    """
    from concurrent.futures import ThreadPoolExecutor  # only here: half of `inspect`'s import time

    def one(path: str) -> str | OSError:
        try:
            return _checksum(os.path.join(tag_dir, path), progress)
        except OSError as error:
            return error

    names = list(paths)
    with ThreadPoolExecutor(threads or min(16, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a complete checkpoint consists of."""

    iteration: int
    tag: str
    #: the save that wrote it; the step file has the same.
    save_id: str
    #: digest of the data state that was committed with it.
    digest: str
    files: tuple[FileEntry, ...]
    #: of the same save, relative to ``<save>/megaresume``: what each rank added (`checkpoint.beside`). Always with
    #: checksums.
    beside: tuple[FileEntry, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in (*self.files, *self.beside))

    @property
    def has_checksums(self) -> bool:
        """Whether every file has one."""
        return all(entry.checksum is not None for entry in self.files)

    def to_bytes(self) -> bytes:
        """The content of the file."""
        fields: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION if self.beside else 1,
            "iteration": self.iteration,
            "tag": self.tag,
            "save_id": self.save_id,
            "digest": self.digest,
            "algorithm": ALGORITHM,
            "files": [[entry.path, entry.size, entry.checksum] for entry in self.files],
        }
        if self.beside:
            fields["beside"] = [[entry.path, entry.size, entry.checksum] for entry in self.beside]
        return seal(fields, depth=2)

    def verify(
        self,
        tag_dir: Path,
        *,
        mode: Literal["sizes", "checksums"] = "sizes",
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> list[Problem]:
        """Hold the files on disk against the manifest.

        Files that the manifest does not name are no problem: programs add configuration files after the save.

        Args:
            tag_dir: the tag directory.
            mode: ``checksums`` reads every file that has one; ``sizes`` costs one look-up a file. Files in ``beside``
                are small, and are always read.
            threads: see `checksum_files`.
            progress: see `checksum_files`.

        Returns:
            what is wrong, in the order of the manifest; empty: nothing.
        """
        problems: dict[str, Problem] = {}
        for entry in self.files:
            problem = _size_problem(tag_dir, entry)
            if problem is not None:
                problems[entry.path] = problem
        if mode == "checksums":
            checked = {e.path: e for e in self.files if e.checksum is not None and e.path not in problems}
            actual = checksum_files(tag_dir, checked, threads=threads, progress=progress)
            for path, checksum in actual.items():
                if isinstance(checksum, OSError):
                    detail = f"cannot be read: {checksum.strerror or checksum}"
                    problems[path] = Problem(path=path, kind="unreadable", detail=detail)
                elif checksum != checked[path].checksum:
                    detail = f"checksum is {checksum}, was {checked[path].checksum} when it was saved"
                    problems[path] = Problem(path=path, kind="checksum", detail=detail)
        found = [problems[entry.path] for entry in self.files if entry.path in problems]
        return found + self.verify_beside(tag_dir.parent, threads=threads)

    def verify_beside(self, root: Path, *, threads: int | None = None) -> list[Problem]:
        """Hold the files in ``<root>/megaresume`` against the manifest, with their checksums: as `verify`."""
        if not self.beside:
            return []
        manifest = Manifest(iteration=0, tag="", save_id="", digest="", files=self.beside)
        found = manifest.verify(records_dir(root), mode="checksums", threads=threads)
        return [
            Problem(
                path=f"{records_dir(root).name}/{p.path}", kind=p.kind, detail=f"{rank_file_words(p.path)} {p.detail}"
            )
            for p in found
        ]


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
        iteration: what it must hold; None: anything.
        tag: what it must hold; None: anything.

    Raises:
        CheckpointError: missing, empty, cut short, damaged, of another kind or of another checkpoint.
        NewerFormatError: of a newer version.
    """
    what = "the manifest"
    fields = read_sealed(path, what=what, format_name=FORMAT, version=VERSION, error=CheckpointError)
    try:
        if fields["algorithm"] != ALGORITHM:
            raise ValueError(f"checksums by {fields['algorithm']!r}, not {ALGORITHM}")
        manifest = Manifest(
            iteration=count(fields["iteration"]),
            tag=text(fields["tag"]),
            save_id=text(fields["save_id"]),
            digest=text(fields["digest"]),
            files=tuple(_entry(row) for row in rows(fields["files"])),
            beside=tuple(_entry(row) for row in rows(fields.get("beside", []))),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what} lacks a field or has one of the wrong kind",
            found=f"{path}: {type(error).__name__}: {error}",
            expected=f"the fields of version {VERSION}",
            cause="it was written by a faulty program: its checksum is right",
        ) from error
    wrong: Mapping[str, tuple[object, object]] = {
        "iteration": (manifest.iteration, iteration),
        "tag": (manifest.tag, tag),
    }
    for name, (found, expected) in wrong.items():
        if expected is not None and found != expected:
            raise CheckpointError(
                f"{what} belongs to another checkpoint",
                found=f"{path}: {name} {found}",
                expected=f"{name} {expected}",
                cause="the file was renamed or copied over another one",
            )
    return manifest


def _entry(row: Any) -> FileEntry:
    path, size, checksum = rows(row)
    if not isinstance(path, str) or not path or PurePosixPath(path).is_absolute() or ".." in path.split("/"):
        raise ValueError(f"{path!r} is not a path below the tag directory")
    if b"\0" in os.fsencode(path):
        raise ValueError(f"{path!r} cannot be the path of a file")
    if checksum is not None and not isinstance(checksum, str):
        raise ValueError(f"{checksum!r} is not a checksum")
    return FileEntry(path=path, size=count(size), checksum=checksum)
