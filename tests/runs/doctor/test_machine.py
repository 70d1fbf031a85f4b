"""Versions against those that were tested; packages that are not what they seem; kinds of filesystems; locks; space."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaresume.checkpoint.system import mount_of
from megaresume.runs import machine
from megaresume.runs.machine import (
    TESTED,
    environment_checks,
    filesystem_checks,
    kind_check,
    sync_check,
    version_check,
)

ROOT = Path(__file__).parents[3]


def test_tested_versions_are_those_of_the_tests() -> None:
    pinned = dict(re.findall(r"^([a-z-]+)==([0-9.]+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    declared = dict(re.findall(r'"(torch|deepspeed|megatron-core)>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text()))
    tried = (ROOT / "docs" / "tried.md").read_text()
    #: of these, docs/tried.md tells of newer ones than CI has.
    newer = {"torch": "\ntorch 2.15.0 with it", "megatron-core": "| Megatron-LM 0.19.0 |"}
    for name, (oldest, newest) in TESTED.items():
        assert oldest == declared[name]
        assert newest in newer[name] and newer[name] in tried if name in newer else newest == pinned[name]


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.5.1", "problem"), ("2.6", "ok"), ("2.6.0+cu124", "ok"), ("2.15.0+cpu", "ok"), ("2.16.0.dev1", "warning")],
)
def test_versions(version: str, status: str) -> None:
    check = version_check("torch", version)
    assert check.status == status and version in check.found
    assert (check.action is None) == (status == "ok")


@pytest.mark.process
def test_this_environment() -> None:
    found = {check.name: check for check in environment_checks()}
    assert found["python"].status == "ok" and found["torch"].status == "ok"
    assert {"deepspeed", "megatron-core", "CUDA", "apex"} <= set(found)
    code = "import sys; from megaresume.runs.machine import environment_checks as f; f(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "deepspeed", "megatron", "transformers"}.intersection(done.stdout.split())


def test_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise ImportError('never imported')")
    assert "is not NVIDIA's apex" in machine._apex().found
    (tmp_path / "apex" / "optimizers").mkdir()
    (tmp_path / "amp_C.py").write_text("")
    check = machine._apex()
    assert check.status == "warning" and check.found.endswith("no fused_layer_norm_cuda")
    (tmp_path / "fused_layer_norm_cuda.py").write_text("")
    assert machine._apex().status == "ok"


def test_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '12.8'\n")
    names: list[str] = []
    drivers: list[str | None] = [None]
    monkeypatch.setattr(machine, "_package_dir", lambda _: tmp_path)
    monkeypatch.setattr(machine, "_driver", lambda: drivers[0])
    monkeypatch.setattr(machine.os, "listdir", lambda _: names)

    def status() -> str:
        (check,) = machine._cuda()
        return check.status

    assert status() == "note"  # a login node
    names += ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"]
    drivers[0] = "470.82.01"
    assert status() == "problem"
    drivers[0] = "570.124.06"
    (check,) = machine._cuda()
    assert check.status == "ok" and check.found == "12.8, driver 570.124.06, 2 GPUs"
    (tmp_path / "version.py").write_text("cuda: Optional[str] = None\n")
    assert status() == "problem"
    names.clear()
    assert status() == "note"


MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /scratch rw,noatime - lustre 10.0.0.1@tcp:/fs rw,flock,lazystatfs
31 22 0:41 / /scratch/my\040files rw - nfs4 server:/export rw,vers=4.2
32 22 0:42 / /scratchy rw - tmpfs tmpfs rw
33 30 0:43 / /scratch rw - lustre 10.0.0.2@tcp:/fs rw,localflock
"""


def test_mounts(tmp_path: Path) -> None:
    for path, kind in (("/home/x", "ext4"), ("/scratch/my files/c", "nfs4"), ("/scratchy", "tmpfs")):
        assert mount_of(Path(path), MOUNTS)[0] == kind
    kind, options, *_ = mount_of(Path("/scratch/run"), MOUNTS)  # mounted over
    assert kind == "lustre" and "localflock" in options.split(",")
    assert kind_check(kind, options).status == "warning"
    assert kind_check("lustre", "rw,flock").status == "ok"
    statuses = [kind_check(kind, "rw").status for kind in ("nfs4", "fuse.sshfs", "tmpfs", "overlay", "xfs")]
    assert statuses == ["ok", "ok", "warning", "warning", "note"]
    assert mount_of(tmp_path, Path("/proc/self/mountinfo").read_text())[0] != "unknown"


@pytest.mark.process
def test_locks_and_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def status(size: int | None) -> dict[str, str]:
        return {check.name: check.status for check in filesystem_checks(tmp_path, size, 3)}

    free = machine.shutil.disk_usage(tmp_path).free
    assert status(1000)["locks"] == "ok" and os.listdir(tmp_path) == []
    assert (status(None)["space"], status(1000)["space"]) == ("note", "ok")
    assert (status(int(free / 1.5))["space"], status(10 * free)["space"]) == ("warning", "problem")
    # A filesystem on which locks do nothing: the other process gets one as well.
    monkeypatch.setattr(machine.fcntl, "flock", lambda *_: None)
    assert status(1000)["locks"] == "warning"

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(machine.fcntl, "flock", refuse)
    assert status(1000)["locks"] == "problem" and os.listdir(tmp_path) == []
    (check,) = [c for c in filesystem_checks(Path("/proc"), None, None) if c.name == "writing"]
    assert check.status == "problem" and "cannot be written" in check.found


def test_syncing(tmp_path: Path) -> None:
    kinds = [("ext4", "rw"), ("ext4", "rw,nobarrier"), ("xfs", "barrier=0"), ("nfs4", "rw")]
    assert [sync_check(kind, options, tmp_path).status for kind, options in kinds] == [
        "ok",
        "warning",
        "warning",
        "note",
    ]
    assert sync_check("fuse.x", "rw", tmp_path / "missing").status == "warning"
