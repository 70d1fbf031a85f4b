"""What records contain about the machine and the run that wrote them; and locks left behind by killed builds.

Times are UTC, to the millisecond, readable and sortable as text. The age of a process, the boot of its machine and the
mounts come from the system. `Topology` is the layout of a run: information for people, not part of the data state.

Dead locks of torch's extension builds, for which every later start would wait silently. DeepSpeed builds its operations
when they are first used (``torch.utils.cpp_extension.load``): the process that creates the file ``lock`` of an
extension builds it, and all others wait until that file is gone (``torch.utils.file_baton``). That process keeps the
file open; after a SIGKILL the file stays, and no process has it open.
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
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from megaresume.stream.batches import Balance


def utc(seconds: float) -> str:
    """Seconds since 1970 as ``2025-01-31T23:59:59.123Z``."""
    milliseconds = round(seconds * 1000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{whole}.{milliseconds % 1000:03d}Z"


def seconds_of(time: str) -> float:
    """Seconds since 1970 for a result of `utc`. Raises ValueError if it is not a time."""
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def process_age() -> float | None:
    """Seconds since this process was started; None if the system does not tell (it is not Linux).

    From field 22 of ``/proc/self/stat``, see proc_pid_stat(5): clock ticks from the boot of the system to the start of
    the process.
    """
    try:
        started = int(stat_fields("self")[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return None


#: seconds that ``sysctl`` may take.
_SYSCTL_PATIENCE = 10.0
#: boots of other machines known to be up.
_up: set[str] = set()


def boot_id() -> str:
    """The id of this machine's current boot; memory of earlier boots is lost. Empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return _boot_session()


def identity_of(directory: Path) -> tuple[str, int, int]:
    """An identity of a directory across machines: boot, device and inode. Raises OSError."""
    stat = os.stat(directory)
    return boot_id(), stat.st_dev, stat.st_ino


@functools.cache
def _boot_session() -> str:
    """The boot id on macOS, see sysctl(8); "" on other systems."""
    try:
        words = ["sysctl", "-n", "kern.bootsessionuuid"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SYSCTL_PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def note_boots(boots: Iterable[str]) -> None:
    """Record the boots of this job's machines, which stay up while it runs."""
    _up.update(set(boots) - {boot_id()})


def boots_up() -> frozenset[str]:
    """This boot, and those recorded by `note_boots`."""
    return frozenset({boot_id(), *_up} - {""})


class Mount(NamedTuple):
    """A mounted filesystem; if none is found, only its kind is set, to ``unknown``."""

    kind: str
    #: options of the mount and of the filesystem, separated by commas.
    options: str
    #: what is mounted, and where.
    source: str
    point: str


#: kinds of filesystems that other machines may also see.
_SHARED = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "wekafs", "panfs", "cifs", "smb3"})


def is_shared(kind: str) -> bool:
    """Whether other machines may see a filesystem of this kind too."""
    return kind in _SHARED or kind.startswith("fuse")


def mount_of(directory: Path, mountinfo: str) -> Mount:
    """The mount of a directory, from the text of ``/proc/self/mountinfo``, proc_pid_mountinfo(5)."""
    real = os.path.realpath(directory)
    found = Mount("unknown", "", "", "")
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 6 or len(kinds) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])
        is_above = real == point or real.startswith(point.rstrip("/") + "/")
        # Of several mounts at one point, the last is visible.
        if is_above and len(point) >= len(found.point):
            found = Mount(kinds[0], ",".join([fields[5], *kinds[2:]]), kinds[1], point)
    return found


def stat_fields(pid: int | str) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the third one (the state) on, proc_pid_stat(5).

    The second one, the name in brackets, may itself contain spaces and brackets.

    Raises:
        OSError: there is no such process, or no ``/proc``.
    """
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


#: seconds without a change after which a build in a directory shared with other nodes counts as dead.
_QUIET = 600.0


def dead_locks() -> list[Path]:
    """Build locks of this user that no process of this machine holds; [] if there is no ``/proc``."""
    return [path for path in _locks() if _is_dead(path)] if os.path.isdir("/proc/self/fd") else []


def remedy(lock: Path) -> str:
    """What to do about a dead lock."""
    return f"rm {shlex.quote(str(lock))}, unless another node or container is building {lock.parent.name} now"


def warn_of_dead_locks() -> None:
    """Log dead locks, on the first rank of a node, before it waits for one."""
    if multiprocessing.parent_process() is not None:
        return  # one of its workers
    for lock in dead_locks():
        print(
            f"megaresume: warning: no process holds {lock}: one was killed while it built {lock.parent.name}, and "
            f"every start that needs it waits for ever\n  next action: {remedy(lock)}",
            file=sys.stderr,
            flush=True,
        )


def _locks() -> list[Path]:
    """Build locks in torch's directories: in TORCH_EXTENSIONS_DIR, or below it by version of Python and accelerator."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given is not None:
        return sorted(Path(given).glob("*/lock"))
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return sorted(Path(cache, "torch_extensions").glob("*/*/lock"))


def _is_dead(lock: Path) -> bool:
    try:
        state = lock.stat()
        if state.st_uid != os.getuid():
            return False  # other users' open files are not visible
        quiet = time.time() - max(file.stat().st_mtime for file in (lock, *lock.parent.iterdir()))
        kind = mount_of(lock.parent, Path("/proc/self/mountinfo").read_text()).kind
    except OSError:
        return False  # already gone
    if is_shared(kind) and quiet < _QUIET:
        return False
    return not _is_open(lock.name, (state.st_dev, state.st_ino)) and lock.exists()


def _is_open(name: str, file: tuple[int, int]) -> bool:
    """Whether a process of this user has a file open, by any path."""
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor).endswith(f"/{name}"):
                state = os.stat(descriptor)
                if (state.st_dev, state.st_ino) == file:
                    return True
        except OSError:
            continue  # the process, or its file, is gone
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The numbers of processes and samples; None if the writer does not know."""

    #: number of processes in the run.
    world_size: int = 1
    #: data-parallel size.
    dp: int = 1
    #: tensor-, pipeline- and context-parallel size.
    tp: int = 1
    pp: int = 1
    cp: int = 1
    #: DataLoader worker processes per rank.
    num_workers: int = 0
    #: samples of one rank in one forward pass.
    micro_batch_size: int | None = None
    #: samples in one step, over all ranks.
    global_batch_size: int | None = None
    #: DeepSpeed's ZeRO stage.
    zero_stage: int | None = None
    #: number of machines.
    nodes: int | None = None
    #: how the samples of a step are dealt to the ranks; None: in order.
    balance: Balance | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, without unknown values."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Topology:
        """Read the result of `to_dict`; ignores fields that a later version added.

        Raises:
            ValueError: a value is not an integer, or ``balance`` is invalid.
        """
        if not isinstance(data, dict):
            raise ValueError(f"topology is {data!r}, not an object")
        try:
            counts = _topology(**{name: data[name] for name in data if name in _NAMES})
        except TypeError as error:  # not a key of a cache: a list, an object
            raise ValueError(f"topology: {data!r:.80} holds more than integers") from error
        return replace(counts, balance=Balance.from_dict(data["balance"])) if "balance" in data else counts

    def __str__(self) -> str:
        parts = [f"dp {self.dp}"]
        parts += [f"{name} {size}" for name in ("tp", "pp", "cp") if (size := getattr(self, name)) > 1]
        parts.append(f"workers {self.num_workers}")
        if self.global_batch_size is not None:
            parts.append(f"gbs {self.global_batch_size}")
        if self.balance is not None:
            parts.append(f"balanced by {self.balance.objective}")
        return " ".join(parts)


_NAMES = frozenset(field.name for field in fields(Topology)) - {"balance"}


@functools.lru_cache(maxsize=64, typed=True)  # the lines of a ledger have the same few
def _topology(**known: Any) -> Topology:
    for name, value in known.items():
        if type(value) is not int:
            raise ValueError(f"topology: {name} is {value!r}, not an integer")
    return Topology(**known)
