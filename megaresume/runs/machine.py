"""Checks a machine (versions, CUDA, apex, shared memory) and the filesystem of a checkpoint directory.

Versions come from files and metadata, without importing the packages. For the filesystem: its kind, and whether it can
be written, locks work, and a checkpoint fits.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

from megaresume.checkpoint.system import dead_locks, is_shared, mount_of, remedy
from megaresume.files import leftover_name
from megaresume.render import spell_bytes
from megaresume.runs.answer import Check, Status

_machine = partial(Check, "environment")
_filesystem = partial(Check, "filesystem")

#: package: (oldest version that megaresume declares, newest that its tests ran with), see docs/tried.md.
TESTED = {
    "torch": ("2.6", "2.15.0"),
    "deepspeed": ("0.16.4", "0.19.8"),
    "megatron-core": ("0.12", "0.19.0"),
}
_PYTHON = ((3, 11), (3, 13))
#: oldest driver for each major version of CUDA, from NVIDIA's table of minor version compatibility.
_DRIVERS = {11: 450, 12: 525, 13: 580}
#: bytes; containers have 64 MiB by default, which dataloader workers fill at once.
_SHARED_MEMORY = 1 << 30


def environment_checks() -> list[Check]:
    """Check this machine."""
    found = [_python()]
    for name in TESTED:
        try:
            found.append(version_check(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append(_machine(name, "note", "not installed"))
    return [*found, *_cuda(), _apex(), *_shared_memory(), *_build_locks()]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    status: Status = "ok" if _PYTHON[0] <= sys.version_info[:2] <= _PYTHON[1] else "problem"
    action = None if status == "ok" else "Python 3.11 to 3.13"
    return _machine("python", status, version, action=action)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def version_check(name: str, version: str) -> Check:
    """Compare a version with `TESTED`."""
    oldest, newest = TESTED[name]
    if _numbers(version) < _numbers(oldest):
        return _machine(
            name, "problem", f"{version}, older than {oldest}", action=f"install {name} {oldest} to {newest}"
        )
    if _numbers(version) > _numbers(newest):
        return _machine(
            name,
            "warning",
            f"{version}, newer than {newest}, the newest that was tested",
            action="run megaresume demo; docs/tried.md says how to try an upstream",
        )
    return _machine(name, "ok", version)


def _package_dir(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None


def _cuda() -> list[Check]:
    torch = _package_dir("torch")
    if torch is None:
        return []
    try:
        text = (torch / "version.py").read_text()
    except OSError:
        return []
    match = re.search(r"^cuda\b[^=]*= *'([0-9.]+)'", text, flags=re.MULTILINE)
    devices = len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)])
    if match is None:
        status: Status = "problem" if devices else "note"
        found = "torch is a build without CUDA" + (f", and this machine has {devices} GPUs" if devices else "")
        action = "install the build of torch for this machine's CUDA" if devices else None
        return [_machine("CUDA", status, found, action=action)]
    driver = _driver()
    needed = _DRIVERS.get(int(match[1].split(".")[0]))
    if driver is None or devices == 0:
        found = f"torch is built for CUDA {match[1]}; no GPU or no driver here, as on a login node"
        return [_machine("CUDA", "note", found)]
    if needed is not None and int(driver.split(".")[0]) < needed:
        return [
            _machine(
                "CUDA",
                "problem",
                f"driver {driver} is too old for CUDA {match[1]} of torch, which needs {needed}",
                action="a newer driver, or a build of torch for an older CUDA",
            )
        ]
    return [_machine("CUDA", "ok", f"{match[1]}, driver {driver}, {devices} GPUs")]


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module[^0-9]*([0-9]+(?:\.[0-9]+)+)", text)
    return match[1] if match else None


def _apex() -> Check:
    place = _package_dir("apex")
    if place is None:
        return _machine("apex", "note", "not installed; megaresume does not need it")
    if not (place / "optimizers").is_dir():
        return _machine(
            "apex",
            "warning",
            f"{place} is not NVIDIA's apex",
            cause="the registry has another package of this name",
            action="pip uninstall apex; NVIDIA's is built from a clone of NVIDIA/apex",
        )
    missing = [name for name in ("amp_C", "fused_layer_norm_cuda") if importlib.util.find_spec(name) is None]
    if missing:
        return _machine(
            "apex",
            "warning",
            f"installed without its CUDA extensions: no {', no '.join(missing)}",
            cause="pip reports success even where nothing was compiled; megaresume does not need apex",
            action="APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation . in a clone of NVIDIA/apex",
        )
    return _machine("apex", "ok", "whole")


def _shared_memory() -> list[Check]:
    try:
        total = shutil.disk_usage("/dev/shm").total
    except OSError:
        return []
    if total >= _SHARED_MEMORY:
        return [_machine("/dev/shm", "ok", f"{total / 1e9:.1f} GB")]
    return [
        _machine(
            "/dev/shm",
            "warning",
            f"{total / 1e6:.0f} MB",
            cause="dataloader workers hand over batches through it; when it is full they die with a bus error",
            action="docker run --shm-size=16g, or --ipc=host; or --num-workers 0",
        )
    ]


def _build_locks() -> list[Check]:
    return [
        _machine(
            "build lock",
            "problem",
            f"no process holds {lock}",
            cause=f"a start was killed while it built {lock.parent.name}: those that need it wait for ever, silently",
            action=remedy(lock),
        )
        for lock in dead_locks()
    ]


# -- the filesystem

#: The program by which a second process tries to take a lock that this one holds.
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
    """Check the filesystem of a directory. Writes one small file there, and deletes it.

    Args:
        directory: must exist.
        newest: size of the newest checkpoint in bytes; None if there is none.
        num_files: the number of its files.
    """
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:  # not Linux
        mounts = ""
    mount = mount_of(directory, mounts)
    durable = sync_check(mount.kind, mount.options, directory)
    return [kind_check(mount.kind, mount.options), _locks(directory), durable, *_space(directory, newest, num_files)]


def kind_check(kind: str, options: str) -> Check:
    """What is known about a kind of filesystem."""
    name = "kind"
    if kind in ("tmpfs", "ramfs"):
        return _filesystem(
            name,
            "warning",
            f"{kind}: main memory, gone at a reboot",
            action="save to a disk, or to a filesystem that all nodes share",
        )
    if kind == "overlay":
        return _filesystem(
            name,
            "warning",
            "overlay: the container's own layer, gone with the container",
            action="save to a directory that is mounted into the container",
        )
    if kind == "lustre" and "flock" not in options.split(","):
        return _filesystem(
            name,
            "warning",
            "lustre, mounted without flock",
            cause="locks work on one node only, or not at all",
            action="mount with -o flock; until then start one job at a time on a directory",
        )
    if is_shared(kind):
        return _filesystem(name, "ok", f"{kind}, may be shared between nodes")
    if kind == "unknown":
        return _filesystem(name, "note", "unknown: this system does not say what is mounted where")
    return _filesystem(
        name,
        "note",
        f"{kind}: a disk of this node",
        cause="with several nodes each would save its own part to its own disk",
    )


def sync_check(kind: str, options: str, directory: Path) -> Check:
    """Whether synced data survives a power cut, as far as this machine can tell."""
    name = "syncing"
    if {"nobarrier", "barrier=0"} & set(options.split(",")):
        return _filesystem(
            name,
            "warning",
            f"{kind}, mounted without barriers: a sync does not reach the disk",
            cause="after a power cut, a checkpoint that was called durable may be damaged",
            action="mount it without nobarrier or barrier=0, unless its disks have caches with a battery",
        )
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        return _filesystem(
            name,
            "warning",
            f"{kind}: a directory cannot be synced: {error.strerror or error}",
            cause="after a power cut, a checkpoint that was called durable may be gone",
            action="save to a filesystem that can, or take such losses into account",
        )
    if kind in ("nfs", "nfs4"):
        found = f"{kind}: not known; a server that exports async confirms a sync before it has done it"
        return _filesystem(name, "note", found, action="look for async in the server's /etc/exports")
    return _filesystem(name, "ok", "files and directories can be forced to the disk")


def _locks(directory: Path) -> Check:
    # Named like our temporary files: if this process is killed, the next start removes it.
    path = directory / leftover_name("doctor")
    try:
        with open(path, "x") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            done = subprocess.run(
                [sys.executable, "-c", _TRY, str(path)], capture_output=True, text=True, timeout=60, check=False
            )
    except OSError as error:
        what = "locks do not work" if path.exists() else "cannot be written"
        return _filesystem(
            "locks" if path.exists() else "writing",
            "problem",
            f"{what}: {error.strerror or error}",
            action="mount it with locks (NFS: start lockd; Lustre: -o flock)" if path.exists() else "check permissions",
        )
    finally:
        with contextlib.suppress(OSError):  # nothing is there if it is read-only, which is said then
            path.unlink()
    if done.stdout.split() == ["held"]:
        return _filesystem("locks", "ok", "writable, and locks hold between processes")
    return _filesystem(
        "locks",
        "warning",
        "a lock that one process holds is given to another as well",
        cause="the filesystem is mounted with nolock or localflock",
        action="never start two jobs on one directory",
    )


def _space(directory: Path, newest: int | None, num_files: int | None) -> list[Check]:
    free = shutil.disk_usage(directory).free
    if newest is None:
        found = f"{spell_bytes(free)} free; no checkpoint yet to compare with"
        return [_filesystem("space", "note", found)]
    found = f"{spell_bytes(free)} free, the newest checkpoint has {spell_bytes(newest)}"
    action = "free space, or save elsewhere; keep_last=K, or --megaresume-keep-last K, deletes old checkpoints"
    if free < newest:
        first = _filesystem("space", "problem", found, action=action)
    elif free < 2 * newest:
        cause = "there is room for one more checkpoint, not for two"
        first = _filesystem("space", "warning", found, cause=cause, action=action)
    else:
        first = _filesystem("space", "ok", f"{found}: room for {_count(free // max(newest, 1))}")
    nodes = os.statvfs(directory)
    if nodes.f_files and num_files and nodes.f_favail < 2 * num_files:
        found = f"{nodes.f_favail:,} more files fit, a checkpoint has {num_files:,}"
        return [first, _filesystem("inodes", "warning", found, action=action)]
    return [first]


def _count(number: int) -> str:
    return f"{number:,}" if number < 1000 else "more than 1,000"
