"""What the system says: times for records, the age of this process, and what is mounted where.

Times are UTC, to the millisecond, readable and sortable as text.
"""

from __future__ import annotations

import os
import re
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
    """Seconds since this process was started; None where the system does not tell (it is no Linux).

    Field 22 of ``/proc/self/stat``, see proc_pid_stat(5): clock ticks from the start of the system to that of the
    process.
    """
    try:
        started = int(stat_fields("self")[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return None


#: boots of other machines that are known to be up.
_up: set[str] = set()


def boot_id() -> str:
    """This boot of this machine, as Linux names it: what its memory held at another one is gone. Empty: not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def note_boots(boots: Iterable[str]) -> None:
    """Machines of this job, which are up as long as it runs."""
    _up.update(set(boots) - {boot_id()})


def boots_up() -> frozenset[str]:
    """This boot, and those that `note_boots` was told."""
    return frozenset({boot_id(), *_up} - {""})


class Mount(NamedTuple):
    """A mounted filesystem; the kind ``unknown``, and nothing else, where none is found."""

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
