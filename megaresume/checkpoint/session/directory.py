"""The directories that a run saves to: owned by one job, the same on every node; and a second storage if there is one.

Do all ranks see one directory? Asked before the first step, also if there is no checkpoint to compare yet.

    rank 0   makes a file in <save>/megaresume that no one has seen
    all      look for it under their own path, for a while: caches of shared filesystems lag behind
    all      learn who does not see it

With a disk in each node every node would save its own part of each checkpoint to its own disk, and none would be whole.

The second storage is checked when the engine is attached, and copied to from rank 0:

    attach     both are this job's alone; every rank sees the local directory and the shared one
    load       whichever holds the newest complete checkpoint
    commit     rank 0 hands it to the copying thread
    close      rank 0 waits for the copies, for a while; the end of the program does, too

Do the clocks of the nodes agree? Asked once at the start: the end of a job is a time of day.

    gather   all ranks have met: none is ahead of the others by more than it took
    gather   everybody's time of day, taken after that

What the second one took is the error of the measurement. A rank that was held up in between looks like a clock that is
wrong: a difference is measured again before it is believed.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path

from megaresume.checkpoint.choosing.choose import choose_of_two
from megaresume.checkpoint.lock import release, take
from megaresume.checkpoint.paths import records_dir
from megaresume.checkpoint.saving.copying import adopt
from megaresume.checkpoint.saving.retention import Retention
from megaresume.checkpoint.saving.staging import PATIENCE, Stager
from megaresume.checkpoint.session.ranks import (
    gather,
    is_rank_0,
    known_to_all,
    on_all_ranks,
    on_rank_0,
    pauses,
    world_size,
)
from megaresume.checkpoint.system import mount_of
from megaresume.files import leftover_name, make_dir, write_error
from megaresume.stream.errors import MegaresumeError, SetupError, UsageError

#: how long a rank looks for the file of rank 0. NFS remembers for 30 s at most that a name was not there.
PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.2
_MOST_HOSTS = 20

#: what one rank found: its host, the path, and, if it does not see the file, what is mounted there.
_Seen = tuple[str, str, str | None]


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
        seen: list[_Seen] = gather((os.uname().nodename, str(root), None if sees else _mount(root)))
    finally:
        if is_rank_0():
            (records_dir(root) / name).unlink(missing_ok=True)
    if any(mount is not None for *_, mount in seen):
        raise known_to_all(_refusal(seen, action))


def _look(directory: Path, name: str) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    for _ in pauses(_POLL_SECONDS, _POLL_SECONDS):
        # Listing a directory makes an NFS client ask its server again; asking for a name may be answered from memory.
        if (directory / name).exists() or name in _names(directory):
            return True
        if time.monotonic() >= deadline:
            break
    return False


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
        found=f"what rank 0 wrote into {path} on {first} is not seen after {PATIENCE_SECONDS:g} s by "
        + ", ".join(lines),
        expected="one directory that every rank sees",
        cause="the filesystem is not mounted on these nodes, the path is on a disk of each node, or ranks were given "
        "different paths",
        action=action or f"mount on {hosts} what findmnt -T {path} shows on {first}; or another --save",
    )


def _mount(path: Path) -> str:
    """The filesystem that a path is on, in words."""
    try:
        mount = mount_of(path, Path("/proc/self/mountinfo").read_text(errors="replace"))
    except OSError:
        return "an unknown filesystem"
    return f"{mount.kind} {mount.source}, mounted at {mount.point}" if mount.point else "an unknown filesystem"


def claim_directory(directory: str | os.PathLike[str], *, action: str | None = None) -> None:
    """Take the lock on rank 0, and see that all ranks see it there. Collective; before anything is loaded.

    Args:
        directory: the checkpoint root.
        action: what to do if it is not shared; None: mount it.

    Raises, on every rank:
        CheckpointError: another job writes there, or rank 0 cannot.
        SetupError: a node does not see it.
    """
    # In this order: what another start clears away must not be the file that this one's ranks look for.
    hold_directory(directory)
    try:
        check_shared(directory, action=action)
    except MegaresumeError:
        if is_rank_0():
            release(directory)
        raise


def hold_directory(directory: str | os.PathLike[str]) -> None:
    """Take the lock on rank 0. Collective.

    Raises, on every rank:
        CheckpointError: another job writes there, or rank 0 cannot.
    """

    def hold() -> None:
        take(directory)

    on_rank_0(hold)


#: seconds that the end of a program waits that an error ended.
_PATIENCE_IN_ERROR = 20.0


class Staged:
    """Copies what an engine saves to a second storage. On all ranks; rank 0 does the work. Collective.

    Args:
        save_dir: where the engine saves: fast storage that every rank sees.
        stage_to: where the copies go: an existing directory.
        retention: which old checkpoints stay, in both.

    Raises, on every rank:
        UsageError: both are the same directory.
        SetupError: a rank does not see one of the two.
        CheckpointError: another job writes to one of the two, or it cannot be written.
    """

    def __init__(self, save_dir: str, stage_to: str | os.PathLike[str], retention: Retention) -> None:
        self.local, self.shared = Path(os.path.abspath(save_dir)), Path(os.path.abspath(stage_to))
        on_all_ranks(self._check_shared)
        # Storage of one node each would hold parts of a checkpoint.
        claim_directory(self.local, action="save to the shared storage itself: remove stage_to (--megaresume-stage-to)")
        hold_directory(self.shared)
        self._stager = Stager(self.local, self.shared, retention)
        self._started = False

    def _check_shared(self) -> None:
        local, shared = self.local.resolve(), self.shared.resolve()
        if local == shared or local in shared.parents or shared in local.parents:
            raise UsageError(
                "checkpoints cannot be copied to where they are",
                found=f"saved to {self.local}, copied to {self.shared}",
                expected="two directories, on two storages, neither inside the other",
            )
        if not self.shared.is_dir():
            raise SetupError(
                "the directory to copy checkpoints to does not exist",
                found=f"no directory {self.shared} on {os.uname().nodename}",
                expected="an existing directory: storage that is not mounted must not look like a fresh start",
                cause="the first start of a run, or the storage is not mounted on this node",
                action=f"mount it; for a new run: mkdir -p {self.shared}",
            )

    def holds(self, directory: str | os.PathLike[str]) -> bool:
        """Whether a directory is the local one, by whatever name."""
        return Path(directory).resolve() == self.local.resolve()

    def adopt(self, *, is_fresh: bool) -> None:
        """On rank 0, before the start is recorded.

        Args:
            is_fresh: nothing was loaded, and nothing was looked for.

        Raises:
            CheckpointError: then, if one of the two tells of checkpoints that are no longer whole.
        """
        if is_fresh:
            choose_of_two(self.local, self.shared)
        if (words := adopt(self.local, self.shared)) is not None:
            print(f"megaresume: {words}", flush=True)

    def start(self) -> None:
        """Begin to copy, with what an earlier process left. On rank 0, once; again does nothing."""
        if not self._started:
            self._started = True
            self._stager.start()
            atexit.register(self._at_exit)

    def submit(self, iteration: int, tag: str) -> None:
        """A checkpoint was committed. On rank 0."""
        self._stager.submit(iteration, tag)

    def close(self, timeout: float | None = None) -> None:
        """Wait a limited time for the copies; log what is not copied."""
        if self._started:
            atexit.unregister(self._at_exit)
            self._stager.close(PATIENCE if timeout is None else max(timeout, 0.0))
        release(self.shared)

    def _at_exit(self) -> None:
        self._stager.close(PATIENCE if getattr(sys, "last_value", None) is None else _PATIENCE_IN_ERROR)


#: a difference that is no longer taken for a network's. NTP keeps the clocks of a cluster within milliseconds.
MOST_SECONDS_APART = 5.0
#: how often a difference is measured before it is believed.
_TIMES = 3


def check_clocks(*, needed: bool) -> None:
    """Compare the clocks of all ranks. Collective.

    Args:
        needed: whether the run stops by the time of day.

    Raises, on every rank:
        SetupError: they differ, and ``needed``. If they are not needed, rank 0 prints a warning.
    """
    if world_size() == 1:
        return
    began = time.monotonic()
    gather(None)
    took = time.monotonic() - began
    # Of every rank: how far its clock is from rank 0's, ahead of it if positive, and its host; the nearest measured.
    nearest: dict[int, tuple[float, str]] = {}
    for _ in range(_TIMES):
        began = time.monotonic()
        hosts, times, all_took = zip(*gather((os.uname().nodename, time.time(), took)), strict=True)
        took = time.monotonic() - began
        for rank, found in enumerate(zip((now - times[0] for now in times), hosts, strict=True)):
            nearest[rank] = min(nearest.get(rank, found), found, key=lambda one: abs(one[0]))
        # All ranks hold the same readings, and come to the same decision.
        apart = {host: seconds for seconds, host in nearest.values() if abs(seconds) > MOST_SECONDS_APART}
        if not apart:
            return
    words = [f"{host} is {abs(s):.1f} s {'ahead' if s > 0 else 'behind'}" for host, s in apart.items()]
    shown = ", ".join(words[:10]) + (f", and {len(words) - 10} more" if len(words) > 10 else "")
    error = min(all_took)
    if needed:
        raise known_to_all(_clock_refusal(shown, error))
    if is_rank_0():
        print(
            f"megaresume: WARNING: the clocks of the nodes differ: {shown} (+- {error:.1f} s) of rank 0's on "
            f"{os.uname().nodename}. Times in logs cannot be compared; look at chronyc tracking on these nodes",
            flush=True,
        )


def _clock_refusal(shown: str, error: float) -> SetupError:
    return SetupError(
        "the clocks of the nodes differ, and this run is to stop at a time of day",
        found=f"{shown} (+- {error:.1f} s) of rank 0's",
        expected=f"clocks within {MOST_SECONDS_APART:g} s: it is not known which one the scheduler uses",
        cause="no NTP on these nodes",
        action="chronyc tracking on these nodes; until then --exit-duration-in-mins MINUTES (after_minutes=), which "
        "needs no clock, in place of --megaresume-stop-before-end (before_end=)",
    )
