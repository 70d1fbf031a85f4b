"""Which process writes to a checkpoint root: the owner named in its lock, and whether that process is still alive.

`this_process` describes the caller; `gone` proves that another process has ended, if that can be proved at once:

    the same process            execve, or a second engine in one program
    the same boot, host and     /proc shows that the process no longer exists
    process namespace
    the same Slurm job          an older restart: Slurm has restarted the job, whatever a lost node still does
    the same elastic launch     an older restart of torchrun's
    another Slurm job           unknown to squeue, or not running

No clocks are compared. If nothing can be proved, the lock is watched (`megaresume.checkpoint.lock.lock`).

On disk, a lock (`megaresume.checkpoint.lock.lock`) is numbered directories, of which the highest holds the root:

<save>/megaresume/owner_0000007/
    owner.json          who
    alive               a counter that increases while the owner lives; "released" at its end
    <token>/            drafts: files that the owner is about to rename into place
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megaresume.checkpoint.records.names import records_dir
from megaresume.checkpoint.records.sealed import from_members, read_record, seal
from megaresume.checkpoint.system import boot_id, stat_fields, utc
from megaresume.files import leftover_name, read_file, write_atomic, write_error
from megaresume.stream.errors import CheckpointError

FORMAT, VERSION = "megaresume.owner", 1

#: the PID namespace outside all containers: PROC_PID_INIT_INO in Linux's proc_ns.h.
OUTSIDE = "pid:[4026531836]"

#: ``squeue``'s states of a job whose processes may still run. Any other word, or none, means that they do not.
_MAY_RUN = frozenset(
    {"RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"}
)
#: seconds that ``squeue`` may take.
_SLURM_PATIENCE = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The process that writes to a root: rank 0 of a job."""

    #: unique to this lock, 16 hex digits.
    token: str
    user: str
    uid: int
    host: str
    #: boot of the kernel; PID namespace; None: not Linux.
    boot: str | None
    namespace: str | None
    pid: int
    #: when the process started, in ticks of this boot: a reused process number does not count as the same process.
    started: int | None
    #: from Slurm; None if not under Slurm. ``array``: job and task of a job array.
    job: str | None
    cluster: str | None
    restarts: int
    array: str | None
    #: from torchrun.
    launch: str | None
    relaunches: int
    program: str
    #: the run in the ledger; None if it has none yet.
    run: str | None
    #: UTC, for people.
    since: str

    def to_bytes(self) -> bytes:
        """The content of its file."""
        return seal({"format": FORMAT, "version": VERSION, **asdict(self)}, depth=1)

    def is_same_process(self, other: Owner) -> bool:
        """Whether both are the same process."""
        return self._seen_by(other) and (self.pid, self.started) == (other.pid, other.started)

    def _seen_by(self, other: Owner) -> bool:
        """Whether our ``/proc`` would show that process if it lived: hidepid= hides those of other users, and machines
        that were cloned while they ran have the same boot."""
        me, they = ((one.boot, one.host, one.namespace, one.uid) for one in (self, other))
        return me == they and None not in (self.boot, self.namespace, self.started)

    def __str__(self) -> str:
        job = ""
        if self.job is not None:
            task = "" if self.array is None else f", task {self.array} of a job array"
            again = f", restart {self.restarts}" if self.restarts else ""
            job = f"Slurm job {self.job}{task}{again}, "
        return f"{self.user}'s {job}process {self.pid} on {self.host} ({self.program}), since {self.since}"

    @property
    def how_to_end(self) -> str:
        """The command that ends the owner. In a container, a process has another number than outside."""
        if self.job is not None:
            return f"scancel {self.job}"
        is_seen = (self.boot, self.namespace) == (boot_id() or None, _namespace())
        where = "" if is_seen or self.namespace in (None, OUTSIDE) else "in its container "
        return f"kill {self.pid} {where}on {self.host}"


def this_process(*, token: str, run: str | None = None) -> Owner:
    """This process, as an owner."""
    variables = os.environ
    task = variables.get("SLURM_ARRAY_TASK_ID")
    return Owner(
        token=token,
        user=_user(),
        uid=os.getuid(),
        host=os.uname().nodename,
        boot=boot_id() or None,
        namespace=_namespace(),
        pid=os.getpid(),
        started=_began(os.getpid()),
        job=variables.get("SLURM_JOB_ID"),
        cluster=variables.get("SLURM_CLUSTER_NAME"),
        restarts=_number("SLURM_RESTART_COUNT"),
        array=None if task is None else f"{variables.get('SLURM_ARRAY_JOB_ID', '?')}_{task}",
        launch=variables.get("TORCHELASTIC_RUN_ID"),
        relaunches=_number("TORCHELASTIC_RESTART_COUNT"),
        program=os.path.basename(sys.argv[0] if sys.argv else "") or "python",
        run=run,
        since=utc(time.time()),
    )


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container without that user
        return f"uid {os.getuid()}"


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _namespace() -> str | None:
    """The PID namespace of ``/proc``; None if it is not ours."""
    try:
        return os.readlink("/proc/self/ns/pid") if os.readlink("/proc/self") == str(os.getpid()) else None
    except OSError:
        return None


def _began(pid: int) -> int | None:
    """Field 22 of ``/proc/PID/stat``, see proc_pid_stat(5); None if there is no such process, or only a zombie."""
    try:
        state, *rest = stat_fields(pid)
        if state in "XZ" and len(os.listdir(f"/proc/{pid}/task")) <= 1:
            return None
        return int(rest[18])
    except (OSError, ValueError, IndexError):
        return None


def read_owner(path: Path) -> Owner:
    """Read the owner in a lock.

    Raises:
        CheckpointError: it is missing or damaged.
        NewerFormatError: it has a newer version.
    """
    return read_record(
        path,
        lambda fields: from_members(Owner, fields),
        what="the name of the owner",
        format_name=FORMAT,
        version=VERSION,
        error=CheckpointError,
    )


def gone(owner: Owner, me: Owner, *, ask_slurm: bool = True) -> str | None:
    """Why an owner has certainly ended, or no longer counts; None if that is not certain.

    Args:
        owner: the one in the lock.
        me: this process.
        ask_slurm: call ``squeue`` if nothing else decides.
    """
    if owner.is_same_process(me):
        return "it is this process"
    # A process that certainly exists has not ended, whatever is known about its job: variables of a job survive in
    # shells and programs that outlive it.
    there = owner._seen_by(me)
    if there and _began(owner.pid) != owner.started:
        return "that process is gone"
    if owner.job is not None and (owner.job, owner.cluster) == (me.job, me.cluster):
        if owner.restarts < me.restarts:
            return f"this is restart {me.restarts} of that job"
        same_launch = (owner.restarts, owner.launch) == (me.restarts, me.launch) and me.launch not in (None, "none")
        if same_launch and owner.relaunches < me.relaunches and not there:
            return f"this is torchrun's restart {me.relaunches} of it"
        return None  # a job that asks is running
    if ask_slurm and not there and owner.job is not None and owner.cluster == me.cluster:
        return _gone_from_slurm(owner.job)
    return None


def _gone_from_slurm(job: str) -> str | None:
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SLURM_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        # The answer for a job that ended some minutes ago; any other error means that Slurm did not answer.
        return "Slurm does not know that job any more" if "Invalid job id" in done.stderr else None
    states = set(done.stdout.split())
    if states & _MAY_RUN:
        return None
    return f"squeue calls that job {' and '.join(sorted(states))}" if states else "squeue does not list that job"


OWNER, ALIVE = "owner.json", "alive"
RELEASED = "released"

_NAME = re.compile(r"owner_([0-9]{7,18})")
#: bytes of the counter: every write replaces all of them.
_WIDTH = 20
#: errors of a rename whose target is somebody else's directory.
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY})


def place(root: Path, number: int) -> Path:
    """The directory with a number."""
    return records_dir(root) / f"owner_{number:07d}"


def newest(root: Path) -> int | None:
    """The number that holds a root, or last did; None if none ever did. Raises CheckpointError: it cannot be listed."""
    return max(_numbers(root), default=None)


def _numbers(root: Path) -> list[int]:
    try:
        names = os.listdir(records_dir(root))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot see who writes to {root}",
            found=f"{records_dir(root)}: {error.strerror or error}",
            expected="a directory that can be listed",
            action="give this user the permission to read it",
        ) from error
    return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]


def write_alive(directory: Path, text: str) -> None:
    """Replace the counter in place: readers only check whether it has changed.

    Raises:
        OSError: FileNotFoundError if the directory has been removed.
    """
    descriptor = os.open(directory / ALIVE, os.O_WRONLY)
    try:
        os.pwrite(descriptor, text.ljust(_WIDTH).encode(), 0)
    finally:
        os.close(descriptor)


def read_alive(directory: Path) -> str | None:
    """The counter; None if it cannot be read. An NFS client asks its server whenever a file is opened."""
    try:
        return read_file(directory / ALIVE).decode("ascii", "replace").strip()
    except OSError:
        return None


def claim(root: Path, number: int, owner: Owner) -> bool:
    """Create the directory with a number atomically, and remove the lower ones.

    Returns:
        False: another process was faster.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    draft = records_dir(root) / leftover_name("owner")
    try:
        (draft / owner.token).mkdir(parents=True)
        (draft / ALIVE).write_text("0".ljust(_WIDTH))
        write_atomic(draft / OWNER, owner.to_bytes(), sync_dir=False)
        os.rename(draft, place(root, number))
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if error.errno not in _TAKEN:
            raise write_error(draft, error) from error
        # If a server's answer was lost, the retry is refused because the rename is already done.
        if not (place(root, number) / owner.token).is_dir():
            return False
    # A process that looked before the last owner came may have found a free number: only the highest one counts.
    others = [other for other in _numbers(root) if other != number]
    if any(other > number for other in others):
        remove(root, number)
        return False
    for other in others:
        remove(root, other)
    return True


def remove(root: Path, number: int) -> None:
    """Remove a directory from its owner. When this returns, nothing can be renamed out of it any more.

    Raises:
        CheckpointError: it cannot be removed.
    """
    away = records_dir(root) / leftover_name("owner")
    try:
        os.rename(place(root, number), away)
    except FileNotFoundError:
        return
    except OSError as error:
        raise write_error(place(root, number), error) from error
    for _ in range(20):
        # Its owner's NFS client refers to the directory by a handle, not its name, and may still write into it.
        shutil.rmtree(away, ignore_errors=True)
        if not away.exists():
            return
        time.sleep(0.05)
    raise CheckpointError("the lock of another job cannot be removed", found=str(away), action=f"rm -r {away}")
