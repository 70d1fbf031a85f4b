"""Do all ranks see one directory? Asked before the first step, also where there is no checkpoint to compare yet.

    rank 0   makes a file in <save>/megaresume that no one has seen
    all      look for it under their own path, for a while: caches of shared filesystems lag behind
    all      learn who does not see it

With a disk in each node every node would save its own part of each checkpoint to its own disk, and none would be whole.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from megaresume.checkpoint.atomic import leftover_name, make_dir, write_error
from megaresume.checkpoint.layout import records_dir
from megaresume.checkpoint.system import mount_of
from megaresume.integrations.ranks import gather, is_rank_0, known_to_all, on_rank_0, world_size
from megaresume.stream.errors import SetupError

__all__ = ["PATIENCE_SECONDS", "check_shared"]

#: how long a rank looks for the file of rank 0. NFS remembers for 30 s at most that a name was not there.
PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.2
_MOST_HOSTS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """What one rank found."""

    host: str
    path: str
    sees: bool
    #: what is mounted there.
    mount: str


def check_shared(directory: str | os.PathLike[str], *, action: str | None = None) -> None:
    """Make sure that a directory which rank 0 writes to is the same on every rank. Collective.

    Args:
        directory: as this rank names it; rank 0 creates it if need be.
        action: what to do otherwise; None: mount it.

    Raises, on every rank:
        SetupError: naming every host that does not see what rank 0 has written.
        CheckpointError: rank 0 cannot write there.
    """
    if world_size() == 1:
        return
    root = Path(os.path.abspath(directory))

    def make() -> str:
        make_dir(records_dir(root))
        name = leftover_name("seen")
        try:
            (records_dir(root) / name).touch()
        except OSError as error:
            raise write_error(records_dir(root) / name, error) from error
        return name

    name = on_rank_0(make)
    try:
        sees = _look(records_dir(root), name)
        mount = "" if sees else _mount(root)
        seen: list[_Seen] = gather(_Seen(host=os.uname().nodename, path=str(root), sees=sees, mount=mount))
    finally:
        if is_rank_0():
            (records_dir(root) / name).unlink(missing_ok=True)
    if not all(rank.sees for rank in seen):
        raise known_to_all(_refusal(seen, action))


def _look(directory: Path, name: str) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        # Listing a directory makes an NFS client ask its server anew; asking for a name may be answered from memory.
        if (directory / name).exists() or name in _names(directory):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _refusal(seen: list[_Seen], action: str | None) -> SetupError:
    first = seen[0]
    blind: dict[str, list[int]] = {}
    for rank, other in enumerate(seen):
        if not other.sees:
            blind.setdefault(other.host, []).append(rank)
    lines = []
    for host, ranks in list(blind.items())[:_MOST_HOSTS]:
        one = seen[ranks[0]]
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        lines.append(f"{host} ({which}; {one.path} is on {one.mount})")
    if len(blind) > _MOST_HOSTS:
        lines.append(f"and {len(blind) - _MOST_HOSTS} more")
    hosts = ", ".join(list(blind)[:_MOST_HOSTS])
    return SetupError(
        "the directory to save to is not one and the same on every node",
        found=f"what rank 0 wrote into {first.path} on {first.host} is not seen after {PATIENCE_SECONDS:g} s by "
        + ", ".join(lines),
        expected="one directory that every rank sees",
        cause="the filesystem is not mounted on these nodes, the path is on a disk of each node, or ranks were given "
        "different paths",
        action=action or f"mount on {hosts} what findmnt -T {first.path} shows on {first.host}; or another --save",
    )


def _mount(path: Path) -> str:
    """The filesystem that a path is on, in words."""
    try:
        mount = mount_of(path, Path("/proc/self/mountinfo").read_text(errors="replace"))
    except OSError:
        return "an unknown filesystem"
    return f"{mount.kind} {mount.source}, mounted at {mount.point}" if mount.point else "an unknown filesystem"
