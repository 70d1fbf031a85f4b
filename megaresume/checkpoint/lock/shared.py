"""Do all ranks see one directory? Checked before the first step, even if there is no checkpoint to compare yet:

    rank 0   creates a new file in <save>/megaresume
    all      look for it under their own path, for a while: caches of shared filesystems lag
    all      learn who does not see it

With a disk in each node, every node would save its own part of each checkpoint to its own disk, and none would be
complete.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

from megaresume.checkpoint.ranks import gather, is_rank_0, known_to_all, on_rank_0, pauses, world_size
from megaresume.checkpoint.records.names import records_dir
from megaresume.checkpoint.system import is_shared, mount_of
from megaresume.files import leftover_name, make_dir, write_error
from megaresume.stream.errors import SetupError

#: how long a rank looks for rank 0's file. NFS caches for at most 30 s that a name does not exist.
SEEN_WITHIN_SECONDS = 30.0
_POLL_SECONDS = 0.2
#: most hosts named in an error.
_MOST_HOSTS = 20

#: the result of one rank: its host, the path, and, if it does not see the file, what is mounted there.
_Seen = tuple[str, str, str | None]


def check_shared(directory: str | os.PathLike[str], *, action: str | None) -> None:
    """Check that a directory in which rank 0 writes is the same on every rank. Collective.

    Args:
        directory: this rank's path; rank 0 creates it if necessary.
        action: what the user should do if it is not; None: mount it.

    Raises, on every rank:
        SetupError: names every host that does not see rank 0's file.
        CheckpointError: rank 0 cannot write there.
    """
    if world_size() == 1:
        return
    root = Path(os.path.abspath(directory))

    def make() -> str:
        make_dir(records_dir(root))
        name = leftover_name("seen")
        leave(records_dir(root) / name)
        return name

    name = on_rank_0(make)
    try:
        sees = _seen(records_dir(root), [name], SEEN_WITHIN_SECONDS)
        seen: list[_Seen] = gather((os.uname().nodename, str(root), None if sees else _mount(root)))
    finally:
        if is_rank_0():
            (records_dir(root) / name).unlink(missing_ok=True)
    if any(mount is not None for *_, mount in seen):
        raise known_to_all(_refusal(seen, action))


def leave(path: Path) -> None:
    """Create an empty file, for others to see.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        path.touch()
    except OSError as error:
        raise write_error(path, error) from error


def _seen(directory: Path, wanted: Collection[str], seconds: float) -> set[str]:
    """Those of the wanted names that are seen in a directory: as soon as all are, or after this many seconds."""
    deadline = time.monotonic() + seconds
    for _ in pauses(_POLL_SECONDS, _POLL_SECONDS):
        # Listing a directory makes an NFS client ask its server; looking for a name may be answered from its cache.
        there = set(_names(directory))
        seen = {name for name in wanted if name in there or (directory / name).exists()}
        if len(seen) == len(wanted) or time.monotonic() >= deadline:
            break
    return seen


def seen_within(directory: Path, names: list[str | None]) -> set[int]:
    """Which ranks' files are seen in a directory: at once if no other machine can see it, otherwise within the time
    that `check_shared` allows.

    Args:
        directory: on this machine.
        names: for each rank, the name of a file that it created in the directory it sees; None: it created none.
    """
    kind = _kind(directory)
    seconds = SEEN_WITHIN_SECONDS if kind == "unknown" or is_shared(kind) else 0.0
    seen = _seen(directory, [name for name in names if name is not None], seconds)
    return {number for number, name in enumerate(names) if name in seen}


def _kind(directory: Path) -> str:
    try:
        return mount_of(directory, Path("/proc/self/mountinfo").read_text(errors="replace")).kind
    except OSError:
        return "unknown"


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _refusal(seen: list[_Seen], action: str | None) -> SetupError:
    first, path, _ = seen[0]
    blind: dict[str, list[int]] = {}
    for rank, (host, _, mount) in enumerate(seen):
        if mount is not None:
            blind.setdefault(host, []).append(rank)
    lines = []
    for host, ranks in list(blind.items())[:_MOST_HOSTS]:
        _, place, mount = seen[ranks[0]]
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        lines.append(f"{host} ({which}; {place} is on {mount})")
    if len(blind) > _MOST_HOSTS:
        lines.append(f"and {len(blind) - _MOST_HOSTS} more")
    hosts = ", ".join(list(blind)[:_MOST_HOSTS])
    return SetupError(
        "the save directory is not the same on every node",
        found=f"what rank 0 wrote into {path} on {first} is not seen after {SEEN_WITHIN_SECONDS:g} s by "
        + ", ".join(lines),
        expected="one directory that every rank sees",
        cause="the filesystem is not mounted on these nodes, the path is on a disk of each node, or ranks were given "
        "different paths",
        action=action
        or f"mount on {hosts} what findmnt -T {path} shows on {first}; or save to another directory; if the nodes "
        "share none: stage_to (--megaresume-stage-to), the URL of an object store, which each copies its part to",
    )


def _mount(path: Path) -> str:
    """The filesystem that a path is on, in words."""
    try:
        mount = mount_of(path, Path("/proc/self/mountinfo").read_text(errors="replace"))
    except OSError:
        return "an unknown filesystem"
    return f"{mount.kind} {mount.source}, mounted at {mount.point}" if mount.point else "an unknown filesystem"
