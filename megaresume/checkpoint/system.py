"""What the system says: times for records, the age of this process, and what is mounted where.

Times are UTC, to the millisecond, readable and sortable as text.

Locks of torch's builds of extensions whose process is dead: every later start would wait for them, without a word.

DeepSpeed builds its operations when they are first used (`torch.utils.cpp_extension.load`): the process that makes the
file ``lock`` of an extension builds it, and all others wait until that file is gone (`torch.utils.file_baton`). That
process has the file open meanwhile; after a SIGKILL nobody has, and it stays.
"""

from __future__ import annotations

import functools
import glob
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


def utc(seconds: float) -> str:
    """Seconds since 1970 as ``2025-01-31T23:59:59.123Z``."""
    milliseconds = round(seconds * 1000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{whole}.{milliseconds % 1000:03d}Z"


def process_age() -> float | None:
    """Seconds since this process was started; None if the system does not tell (it is not Linux).

    Field 22 of ``/proc/self/stat``, see proc_pid_stat(5): clock ticks from the start of the system to that of the
    process.
    """
    try:
        started = int(stat_fields("self")[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return None


#: seconds that ``sysctl`` may take.
_SYSCTL_PATIENCE = 10.0
#: boots of other machines that are known to be up.
_up: set[str] = set()


def boot_id() -> str:
    """This boot of this machine, as its system names it: what memory held at another one is gone. Empty: not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return _boot_session()


@functools.cache
def _boot_session() -> str:
    """The name that macOS has for it, sysctl(8); "" on other systems."""
    try:
        words = ["sysctl", "-n", "kern.bootsessionuuid"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SYSCTL_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def note_boots(boots: Iterable[str]) -> None:
    """Machines of this job, which are up as long as it runs."""
    _up.update(set(boots) - {boot_id()})


def boots_up() -> frozenset[str]:
    """This boot, and those that `note_boots` was told."""
    return frozenset({boot_id(), *_up} - {""})


class Mount(NamedTuple):
    """A mounted filesystem; the kind ``unknown``, and nothing else, if none is found."""

    kind: str
    #: of the mount and of the filesystem, with commas between them.
    options: str
    #: what is mounted, and where.
    source: str
    point: str


#: kinds of filesystems that other machines may see too.
_SHARED = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "wekafs", "panfs", "cifs", "smb3"})


def is_shared(kind: str) -> bool:
    """Whether other machines may see a filesystem of this kind too."""
    return kind in _SHARED or kind.startswith("fuse")


def mount_of(directory: Path, mountinfo: str) -> Mount:
    """The mount that a directory lies on, from the text of ``/proc/self/mountinfo``, proc_pid_mountinfo(5)."""
    real = os.path.realpath(directory)
    found = Mount("unknown", "", "", "")
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 6 or len(kinds) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])
        is_above = real == point or real.startswith(point.rstrip("/") + "/")
        # The last of several mounts at one point is the one that is seen.
        if is_above and len(point) >= len(found.point):
            found = Mount(kinds[0], ",".join([fields[5], *kinds[2:]]), kinds[1], point)
    return found


def stat_fields(pid: int | str) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the third one on, its state, proc_pid_stat(5).

    The second one, the name in brackets, may hold spaces and brackets of its own.

    Raises:
        OSError: there is no such process, or no ``/proc``.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


#: seconds without a change after which a build in a directory that other nodes see is taken for dead.
_QUIET = 600.0


def dead_locks() -> list[Path]:
    """Those of this user that no process of this machine holds; [] if there is no ``/proc``."""
    return [path for path in _locks() if _is_dead(path)] if os.path.isdir("/proc/self/fd") else []


def remedy(lock: Path) -> str:
    """What to do about one of them."""
    return f"rm {shlex.quote(str(lock))}, unless another node or container is building {lock.parent.name} now"


def warn_of_dead_locks() -> None:
    """Name them: of the first rank of a node, before it waits for one."""
    if multiprocessing.parent_process() is not None:
        return  # a worker of it
    for lock in dead_locks():
        print(
            f"megaresume: warning: no process holds {lock}: one was killed while it built {lock.parent.name}, and "
            f"every start that needs it waits for ever\n  next action: {remedy(lock)}",
            file=sys.stderr,
            flush=True,
        )


def _locks() -> list[Path]:
    """As torch places them: in TORCH_EXTENSIONS_DIR itself, or by version of Python and accelerator."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given is not None:
        return sorted(Path(given).glob("*/lock"))
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return sorted(Path(cache, "torch_extensions").glob("*/*/lock"))


def _is_dead(lock: Path) -> bool:
    try:
        state = lock.stat()
        if state.st_uid != os.getuid():
            return False  # what the processes of others have open is not shown
        quiet = time.time() - max(file.stat().st_mtime for file in (lock, *lock.parent.iterdir()))
        kind = mount_of(lock.parent, Path("/proc/self/mountinfo").read_text()).kind
    except OSError:
        return False  # gone by now
    if is_shared(kind) and quiet < _QUIET:
        return False
    return not _is_open(lock.name, (state.st_dev, state.st_ino)) and lock.exists()


def _is_open(name: str, file: tuple[int, int]) -> bool:
    """Whether a process of this user has it open, by whatever path."""
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor).endswith(f"/{name}"):
                state = os.stat(descriptor)
                if (state.st_dev, state.st_ino) == file:
                    return True
        except OSError:
            continue  # the process, or its file, is gone
    return False
