"""Compares the files to be loaded with those that were saved.

They are compared where they will be read, by all machines together:

    every directory    of the tag, identified by machine and mount; its lowest rank works for it
    the same files?    by size and time of change, as rank 0 sees them: a shared filesystem
    together           ranks that see the same files share the work; a separate directory (a local copy) is read whole
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megaresume.checkpoint import system
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import gather, is_rank_0, on_all_ranks, on_all_ranks_for_long, on_rank_0, rank
from megaresume.checkpoint.records.manifest import FileEntry, Manifest, verify_files
from megaresume.files import read_error
from megaresume.stream.errors import listed

#: from this many bytes on, a start logs what it is waiting for.
_MUCH = 10e9

#: for every file: its size and the time of its last change in nanoseconds, which no copy preserves; None if missing.
_Stats = list[tuple[int, int] | None]


def find_damage(choice: Choice) -> str | None:
    """Compare the files of a choice with its manifest, where they will be read. Collective.

    Returns:
        what is wrong, in words, the same on every rank; None: nothing.

    Raises, on every rank:
        CheckpointError: a rank does not see the directory, or gives no sign of life.
    """
    manifest = choice.manifest
    if manifest is None:
        return None
    places = gather(on_all_ranks(lambda: _place(choice.tag_dir)))
    distinct = list(dict.fromkeys(places))
    mine = distinct.index(places[rank()])
    works = places.index(places[rank()]) == rank()
    stats = on_rank_0(lambda: _stats(choice.tag_dir, manifest))
    same = gather(works and _stats(choice.tag_dir, manifest) == stats)
    sharing = [number for number, place in enumerate(distinct) if same[places.index(place)]]
    if is_rank_0() and manifest.size >= _MUCH:
        print(f"megaresume: comparing the checksums of {choice.tag}, {manifest.size / 1e9:,.0f} GB", flush=True)

    def compare(beat: Callable[[], None]) -> str | None:
        if not works:
            return None
        files = manifest.files
        if mine in sharing:
            files = _shares(files, len(sharing))[sharing.index(mine)]
        problems = verify_files(choice.tag_dir, files, mode="checksums", progress=lambda _size: beat())
        return listed(problems, 5, "; ")

    found = gather(on_all_ranks_for_long(compare, "compared checksums"))
    wrong = next((number for number, words in enumerate(found) if words), None)
    if wrong is None:
        return None
    where = "" if len(distinct) == 1 else f"as rank {wrong} sees it, on {gather(os.uname().nodename)[wrong]}: "
    return f"{where}{found[wrong]}"


def _place(tag_dir: Path) -> tuple[str, int, int]:
    """See `system.identity_of`. Raises CheckpointError."""
    try:
        return system.identity_of(tag_dir)
    except OSError as error:
        raise read_error(tag_dir, error) from error


def _stats(tag_dir: Path, manifest: Manifest) -> _Stats:
    def one(entry: FileEntry) -> tuple[int, int] | None:
        try:
            stat = os.stat(os.path.join(tag_dir, entry.path))
        except OSError:
            return None
        return stat.st_size, stat.st_ctime_ns

    return [one(entry) for entry in manifest.files]


def _shares(files: Sequence[FileEntry], number: int) -> list[tuple[FileEntry, ...]]:
    """Split files into parts of about the same size in bytes."""
    parts: list[list[FileEntry]] = [[] for _ in range(number)]
    sizes = [0] * number
    for entry in sorted(files, key=lambda entry: -entry.size):
        least = sizes.index(min(sizes))
        parts[least].append(entry)
        sizes[least] += entry.size
    return [tuple(part) for part in parts]


def compared(tag: str, manifest: Manifest) -> str:
    """What was compared before a load, in words."""
    num = len(manifest.files)
    if manifest.has_checksums:
        return f"checksums compared: {num} files of {tag}"
    if manifest.durable:
        return f"checksums not compared: {tag} was saved without; sizes compared: {num} files"
    if some := sum(entry.checksum is not None for entry in manifest.files):
        return (
            f"checksums compared: {some} of {num} files of {tag}; the run ended before those of the others were taken; "
            "their sizes compared"
        )
    return f"checksums not compared: the run ended before those of {tag} were taken; sizes compared: {num} files"
