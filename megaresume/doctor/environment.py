"""The environment: versions, CUDA, apex, shared memory. Nothing of it is imported: files and metadata say it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from megaresume.doctor.check import Check, Status

__all__ = ["TESTED", "environment_checks", "version_check"]

#: package: (oldest that megaresume declares, newest that its tests ran with), see docs/compatibility.md.
TESTED = {
    "torch": ("2.4", "2.13.0"),
    "deepspeed": ("0.16", "0.19.8"),
    "megatron-core": ("0.12", "0.19.0"),
}
_PYTHON = ((3, 11), (3, 13))
#: oldest driver for each major version of CUDA, from NVIDIA's table of minor version compatibility.
_DRIVERS = {11: 450, 12: 525, 13: 580}
#: bytes; what containers give by default is 64 MiB, which dataloader workers fill at once.
_SHARED_MEMORY = 1 << 30


def environment_checks() -> list[Check]:
    """Look at this machine."""
    found = [_python()]
    for name in TESTED:
        try:
            found.append(version_check(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append(Check(area="environment", name=name, status="note", found="not installed"))
    return [*found, *_cuda(), _apex(), *_shared_memory()]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    status: Status = "ok" if _PYTHON[0] <= sys.version_info[:2] <= _PYTHON[1] else "problem"
    action = None if status == "ok" else "Python 3.11 to 3.13"
    return Check(area="environment", name="python", status=status, found=version, action=action)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def version_check(name: str, version: str) -> Check:
    """Compare a version with those of `TESTED`."""
    oldest, newest = TESTED[name]
    if _numbers(version) < _numbers(oldest):
        return Check(
            area="environment",
            name=name,
            status="problem",
            found=f"{version}, older than {oldest}",
            action=f"install {name} {oldest} to {newest}",
        )
    if _numbers(version) > _numbers(newest):
        return Check(
            area="environment",
            name=name,
            status="warning",
            found=f"{version}, newer than {newest}, the newest that was tested",
            action="run megaresume demo; docs/compatibility.md says how to try an upstream",
        )
    return Check(area="environment", name=name, status="ok", found=version)


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
        return [Check(area="environment", name="CUDA", status=status, found=found, action=action)]
    driver = _driver()
    needed = _DRIVERS.get(int(match[1].split(".")[0]))
    if driver is None or devices == 0:
        found = f"torch is built for CUDA {match[1]}; no GPU or no driver here, as on a login node"
        return [Check(area="environment", name="CUDA", status="note", found=found)]
    if needed is not None and int(driver.split(".")[0]) < needed:
        return [
            Check(
                area="environment",
                name="CUDA",
                status="problem",
                found=f"driver {driver} is too old for CUDA {match[1]} of torch, which needs {needed}",
                action="a newer driver, or a build of torch for an older CUDA",
            )
        ]
    return [Check(area="environment", name="CUDA", status="ok", found=f"{match[1]}, driver {driver}, {devices} GPUs")]


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
        return Check(area="environment", name="apex", status="note", found="not installed; megaresume does not need it")
    if not (place / "optimizers").is_dir():
        return Check(
            area="environment",
            name="apex",
            status="warning",
            found=f"{place} is not NVIDIA's apex",
            cause="the registry has another package of this name",
            action="pip uninstall apex; NVIDIA's is built from a clone of NVIDIA/apex",
        )
    missing = [name for name in ("amp_C", "fused_layer_norm_cuda") if importlib.util.find_spec(name) is None]
    if missing:
        return Check(
            area="environment",
            name="apex",
            status="warning",
            found=f"installed without its CUDA extensions: no {', no '.join(missing)}",
            cause="pip reports success even where nothing was compiled; megaresume does not need apex",
            action="APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation . in a clone of NVIDIA/apex",
        )
    return Check(area="environment", name="apex", status="ok", found="whole")


def _shared_memory() -> list[Check]:
    try:
        total = shutil.disk_usage("/dev/shm").total
    except OSError:
        return []
    if total >= _SHARED_MEMORY:
        return [Check(area="environment", name="/dev/shm", status="ok", found=f"{total / 1e9:.1f} GB")]
    return [
        Check(
            area="environment",
            name="/dev/shm",
            status="warning",
            found=f"{total / 1e6:.0f} MB",
            cause="dataloader workers hand over batches through it; when it is full they die with a bus error",
            action="docker run --shm-size=16g, or --ipc=host; or --num-workers 0",
        )
    ]
