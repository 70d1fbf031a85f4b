"""The filesystem of a checkpoint directory: what kind, writable, whether locks work, and whether a checkpoint fits."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from megaresume.checkpoint.proc import mount_of
from megaresume.doctor.check import Check
from megaresume.render import size

__all__ = ["filesystem_checks", "kind_check"]

_SHARED = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "wekafs", "panfs", "cifs", "smb3"})
#: what a second process says about a lock that this one holds.
_TRY = (
    "import fcntl, sys\n"
    "file = open(sys.argv[1], 'r+')\n"
    "try:\n"
    "    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "    print('free')\n"
    "except BlockingIOError:\n"
    "    print('held')\n"
)


def filesystem_checks(directory: Path, newest: int | None, num_files: int | None) -> list[Check]:
    """Look at the filesystem of a directory. Writes one small file into it, and deletes it.

    Args:
        directory: it must be there.
        newest: bytes of the newest checkpoint; None: there is none.
        num_files: of it.
    """
    mount = mount_of(directory, Path("/proc/self/mountinfo").read_text())
    return [kind_check(mount.kind, mount.options), _locks(directory), *_space(directory, newest, num_files)]


def kind_check(kind: str, options: str) -> Check:
    """What to know of a kind of filesystem."""
    name = "kind"
    if kind in ("tmpfs", "ramfs"):
        return Check(
            area="filesystem",
            name=name,
            status="warning",
            found=f"{kind}: main memory, gone at a reboot",
            action="save to a disk, or to a filesystem that all nodes share",
        )
    if kind == "overlay":
        return Check(
            area="filesystem",
            name=name,
            status="warning",
            found="overlay: the container's own layer, gone with the container",
            action="save to a directory that is mounted into the container",
        )
    if kind == "lustre" and "flock" not in options.split(","):
        return Check(
            area="filesystem",
            name=name,
            status="warning",
            found="lustre, mounted without flock",
            cause="locks work on one node only, or not at all",
            action="mount with -o flock; until then start one job at a time on a directory",
        )
    if kind in _SHARED or kind.startswith("fuse"):
        return Check(area="filesystem", name=name, status="ok", found=f"{kind}, may be shared between nodes")
    return Check(
        area="filesystem",
        name=name,
        status="note",
        found=f"{kind}: a disk of this node",
        cause="with several nodes each would save its own part to its own disk",
    )


def _locks(directory: Path) -> Check:
    # The name of one of our temporary files: the next start clears it away, should this process be killed.
    path = directory / f".doctor.megaresume-{os.getpid()}-{os.urandom(4).hex()}.tmp"
    try:
        with open(path, "x") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            done = subprocess.run(
                [sys.executable, "-c", _TRY, str(path)], capture_output=True, text=True, timeout=60, check=False
            )
    except OSError as error:
        what = "locks do not work" if path.exists() else "cannot be written"
        return Check(
            area="filesystem",
            name="locks" if path.exists() else "writing",
            status="problem",
            found=f"{what}: {error.strerror or error}",
            action="mount it with locks (NFS: start lockd; Lustre: -o flock)" if path.exists() else "check permissions",
        )
    finally:
        path.unlink(missing_ok=True)
    if done.stdout.split() == ["held"]:
        return Check(area="filesystem", name="locks", status="ok", found="writable, and locks hold between processes")
    return Check(
        area="filesystem",
        name="locks",
        status="warning",
        found="a lock that one process holds is given to another as well",
        cause="the filesystem is mounted with nolock or localflock",
        action="never start two jobs on one directory",
    )


def _space(directory: Path, newest: int | None, num_files: int | None) -> list[Check]:
    free = shutil.disk_usage(directory).free
    if newest is None:
        found = f"{size(free)} free; no checkpoint yet to compare with"
        return [Check(area="filesystem", name="space", status="note", found=found)]
    found = f"{size(free)} free, the newest checkpoint has {size(newest)}"
    action = "free space, or save elsewhere; --megaresume-keep-last K deletes old checkpoints"
    if free < newest:
        first = Check(area="filesystem", name="space", status="problem", found=found, action=action)
    elif free < 2 * newest:
        cause = "there is room for one more checkpoint, not for two"
        first = Check(area="filesystem", name="space", status="warning", found=found, cause=cause, action=action)
    else:
        first = Check(
            area="filesystem", name="space", status="ok", found=f"{found}: room for {_count(free // max(newest, 1))}"
        )
    nodes = os.statvfs(directory)
    if nodes.f_files and num_files and nodes.f_favail < 2 * num_files:
        found = f"{nodes.f_favail:,} more files fit, a checkpoint has {num_files:,}"
        return [first, Check(area="filesystem", name="inodes", status="warning", found=found, action=action)]
    return [first]


def _count(number: int) -> str:
    return f"{number:,}" if number < 1000 else "more than 1,000"
