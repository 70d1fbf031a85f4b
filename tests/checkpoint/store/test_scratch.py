"""Directories of mirrors: what a kill left goes at the next start, and nothing that is in use."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaresume.checkpoint.store.scratch import Scratch

pytestmark = pytest.mark.process

PROGRAM = """
import os, sys
from megaresume.checkpoint.store.scratch import Scratch
scratch = Scratch()
(scratch.path / "sub").mkdir()
(scratch.path / "sub" / "file").write_bytes(b"x")
print(scratch.path, flush=True)
if os.fork() == 0:
    sys.stdin.read()
    sys.exit()  # a forked process runs what is registered for the end, too
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path


def _start(place: Path) -> tuple[subprocess.Popen[str], Path]:
    env = os.environ | {"TMPDIR": str(place)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_kill_left(place: Path) -> None:
    """While a fork of the killed process lives, the directory is in use."""
    killed, left = _start(place)
    alive, used = _start(place)
    assert killed.stdin is not None and killed.stdout is not None and alive.stdin is not None
    killed.kill()
    killed.wait()
    with Scratch() as mine:
        assert mine.parent == place and left.is_dir() and used.is_dir()
    assert not mine.exists()
    killed.stdin.close()  # the fork ends
    killed.stdout.read()
    with Scratch():
        assert not left.exists() and (used / "sub" / "file").read_bytes() == b"x"
    alive.stdin.close()
    assert alive.wait() == 0
    assert list(place.iterdir()) == []
