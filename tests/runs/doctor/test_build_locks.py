"""Torch's build locks whose process was killed are named before a start waits for them; those in use are not."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megaresume.checkpoint import system as build_locks
from megaresume.checkpoint.system import Mount, dead_locks
from megaresume.runs.machine import environment_checks

pytestmark = pytest.mark.process

#: torch's own lock, without the seconds that it takes to import torch.
HOLDER = """
import runpy, sys, time
baton = runpy.run_path(sys.argv[1])["FileBaton"](sys.argv[2])
print(baton.try_acquire(), flush=True)
time.sleep(600)
"""


@contextmanager
def holder(lock: Path) -> Iterator[None]:
    """A process that builds; killed at the end."""
    lock.parent.mkdir(parents=True)
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    words = [sys.executable, "-c", HOLDER, str(Path(torch.origin).parent / "utils" / "file_baton.py"), str(lock)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        yield
        process.kill()


def test_a_lock_of_a_killed_process_is_named_and_one_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    with holder(lock):
        assert dead_locks() == []
    assert dead_locks() == [lock]
    (check,) = [check for check in environment_checks() if check.name == "build lock"]
    assert check.status == "problem" and str(check.action).startswith(f"rm {lock}, unless")
    for rank in ("0", "1"):
        words = [sys.executable, "-c", "import megaresume"]
        done = subprocess.run(words, env=os.environ | {"LOCAL_RANK": rank}, capture_output=True, text=True, check=True)
        said = done.stderr.splitlines()
        assert len(said) == (2 if rank == "0" else 0)
        assert rank != "0" or (f"no process holds {lock}:" in said[0] and f"rm {lock}" in said[1])
    lock.unlink()
    assert dead_locks() == []


def test_a_directory_that_other_nodes_see_has_been_quiet_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build_locks, "mount_of", lambda *_: Mount("nfs4", "rw", "server:/home", "/home"))
    lock = tmp_path / "torch_extensions" / "py311_cpu" / "fused_adam" / "lock"
    with holder(lock):
        pass
    assert dead_locks() == []  # another node may be at work
    os.utime(lock, (0, 0))
    (lock.parent / "main.o").touch()
    assert dead_locks() == []
    os.utime(lock.parent / "main.o", (0, 0))
    assert dead_locks() == [lock]
