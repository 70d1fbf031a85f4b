"""The files of a checkpoint are those that were saved, wherever they are read: all machines compare checksums together.

every directory    of the tag, by machine and by what is mounted there; its lowest rank works for it
the same files?    by size and time of change, as rank 0 sees them: a shared filesystem
together           who sees the same files shares them; a directory of its own (a local copy) is compared as a whole
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megaresume.checkpoint import system
from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.manifest import FileEntry, Manifest, verify_files
from megaresume.session.ranks import gather, is_rank_0, on_all_ranks, on_all_ranks_for_long, on_rank_0, rank
from megaresume.stream.errors import CheckpointError

#: bytes from which on it is said what a start waits for.
_MUCH = 10e9

#: of every file: its size and the time of its last change in nanoseconds, which no copy keeps; None: it is not there.
_Stats = list[tuple[int, int] | None]


def find_damage(choice: Choice) -> str | None:
    """Compare the files of a chosen checkpoint with its manifest, where they will be read. Collective.

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
        return "; ".join(map(str, problems[:5])) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")

    found = gather(on_all_ranks_for_long(compare, "compared checksums"))
    wrong = next((number for number, words in enumerate(found) if words), None)
    if wrong is None:
        return None
    where = "" if len(distinct) == 1 else f"as rank {wrong} sees it, on {gather(os.uname().nodename)[wrong]}: "
    return f"{where}{found[wrong]}"


def _place(tag_dir: Path) -> tuple[str, int, int]:
    """What tells one directory from another."""
    try:
        stat = os.stat(tag_dir)
    except OSError as error:
        raise CheckpointError(f"cannot read {tag_dir}", found=error.strerror or str(error)) from error
    return system.boot_id(), stat.st_dev, stat.st_ino


def _stats(tag_dir: Path, manifest: Manifest) -> _Stats:
    def one(entry: FileEntry) -> tuple[int, int] | None:
        try:
            stat = os.stat(os.path.join(tag_dir, entry.path))
        except OSError:
            return None
        return stat.st_size, stat.st_ctime_ns

    return [one(entry) for entry in manifest.files]


def _shares(files: Sequence[FileEntry], number: int) -> list[tuple[FileEntry, ...]]:
    """As many parts, of about as many bytes."""
    parts: list[list[FileEntry]] = [[] for _ in range(number)]
    sizes = [0] * number
    for entry in sorted(files, key=lambda entry: -entry.size):
        least = sizes.index(min(sizes))
        parts[least].append(entry)
        sizes[least] += entry.size
    return [tuple(part) for part in parts]
