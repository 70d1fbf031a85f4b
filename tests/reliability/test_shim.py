"""The shim sees what strace sees, and does what it is told to: else the kills would prove nothing."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reliability.shim import environment

#: writes as Python, as torch's two writers, and as our own code do.
SCRIPT = """
import os, shutil, sys
from pathlib import Path
import torch
from megaresume.files import write_atomic
from tests.reliability.shim import Shim
root = Path(sys.argv[1])
shim = Shim()
shim.arm(root, at=int(sys.argv[2]), mode=sys.argv[3], error=int(sys.argv[4]), log=1)
torch.save({"a": torch.arange(9000.0)}, root / "zip.pt")
torch.save({"a": torch.arange(9000.0)}, root / "plain.pt", _use_new_zipfile_serialization=False)
write_atomic(root / "record.json", b"1234")
(root / "tag").mkdir()
shutil.copyfile(root / "zip.pt", root / "tag" / "copy.pt")
shutil.rmtree(root / "tag")
shim.disarm()
"""


def run(
    root: Path, at: int = 0, mode: str = "count", error: int = 0, *trace: object
) -> subprocess.CompletedProcess[str]:
    root.mkdir()
    command = [*trace, sys.executable, "-c", SCRIPT, root, at, mode, error]
    return subprocess.run(
        [str(word) for word in command],
        env=os.environ | environment() | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )


def operations(output: str) -> list[str]:
    return [re.sub(r"megaresume-.*", "", line.split(" ", 1)[1]) for line in output.splitlines() if line != "stopped"]


KINDS = {
    **dict.fromkeys(("open", "openat", "creat"), "open"),
    **dict.fromkeys(("write", "writev", "pwrite64", "sendfile", "copy_file_range"), "write"),
    **dict.fromkeys(("fsync", "fdatasync"), "fsync"),
    **dict.fromkeys(("truncate", "ftruncate"), "truncate"),
    **dict.fromkeys(("rename", "renameat", "renameat2"), "rename"),
    **dict.fromkeys(("unlink", "unlinkat"), "unlink"),
    **dict.fromkeys(("link", "linkat", "symlink", "symlinkat"), "link"),
    **dict.fromkeys(("mkdir", "mkdirat"), "mkdir"),
    "rmdir": "rmdir",
}


def kind_of(line: str, root: str) -> str | None:
    """What the shim would call the system call in a line of strace; None: it should not see it."""
    match = re.match(r"\d+ +(\w+)\((.*)", line)
    if match is None or root not in match[2] or "ENOENT" in match[2]:
        return None
    call, arguments = match[1], match[2]
    if call == "unlinkat" and "AT_REMOVEDIR" in arguments:
        return "rmdir"
    return None if "O_RDONLY" in arguments else KINDS[call]


@pytest.mark.skipif(shutil.which("strace") is None, reason="apt-get install strace")
def test_it_sees_what_strace_sees(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    done = run(tmp_path / "root", 0, "count", 0, "strace", "-f", "-y", "-o", trace, "-e", f"trace={','.join(KINDS)}")
    if done.returncode and "ptrace" in done.stderr.lower():
        pytest.skip("this machine does not let strace trace")
    assert done.returncode == 0, done.stderr
    # Whether a file that is closed was open for writing does not stand in its line.
    seen = [kind for line in trace.read_text().splitlines() if (kind := kind_of(line, str(tmp_path / "root")))]
    assert [line.split()[0] for line in operations(done.stdout) if not line.startswith("close")] == seen


def test_it_stops_where_it_is_told_to(tmp_path: Path) -> None:
    everything = operations(run(tmp_path / "all").stdout)
    kinds = {line.split()[0] for line in everything}
    assert {"open", "write", "close", "fsync", "rename", "mkdir", "unlink", "rmdir"} <= kinds
    first_write = next(i for i, line in enumerate(everything) if line.startswith("write"))
    killed = run(tmp_path / "killed", first_write + 1, "kill")
    assert killed.returncode == -signal.SIGKILL
    assert operations(killed.stdout) == everything[: first_write + 1]
    assert (tmp_path / "killed" / "zip.pt").stat().st_size == 0
    half = run(tmp_path / "half", 1, "half")
    assert half.returncode == -signal.SIGKILL
    assert 0 < (tmp_path / "half" / "zip.pt").stat().st_size < (tmp_path / "all" / "zip.pt").stat().st_size
    full = run(tmp_path / "full", first_write + 1, "full", 28)
    assert full.returncode == 1
    assert "write" in full.stderr.lower()
