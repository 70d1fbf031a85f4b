"""docs/troubleshooting.md: its commands, run as they stand there, and the lines that it shows."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaresume.runs.logs import scan
from tests.cli.test_latest import write_zero

TEXT = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
COMMANDS = re.findall(r"^    megaresume (doctor.*)$", TEXT, flags=re.MULTILINE)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_zero(tmp_path / "checkpoints", 30)
    write_zero(tmp_path / "checkpoints", 40, complete=False)
    (tmp_path / "slurm-77.out").write_text("all is well\n")
    (tmp_path / "launch.log.gz").write_bytes(gzip.compress(b"1\n2\nOSError: [Errno 28] No space left on device\n"))
    return tmp_path


@pytest.mark.process
def test_commands(directory: Path) -> None:
    assert len(COMMANDS) == 5
    printed = ""
    for command in COMMANDS:
        line = f"{sys.executable} -m megaresume {command}"
        done = subprocess.run(line, shell=True, cwd=directory, capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        # The last one ends in `|| echo`.
        assert done.returncode == (1 if "checkpoints/" in command and "||" not in command else 0)
        printed += done.stdout
    assert (directory / "doctor.json").stat().st_size > 100
    shown = re.findall(r"\n    checkpoints\n(.*?)\nThe exit status", TEXT, flags=re.DOTALL)[0].splitlines()
    assert len(shown) == 7
    for line in shown:
        line = re.sub(r"saved [\d.]+ \w+ ago", "", line.strip())
        assert line in re.sub(r"saved [\d.]+ \w+ ago", "", printed), line


def test_the_table(tmp_path: Path) -> None:
    lines = re.findall(r"^\| `(.+?)` \| [A-Za-z]", TEXT.split("the log says")[1], flags=re.MULTILINE)
    assert len(lines) == 5
    (tmp_path / "log").write_text("\n".join(lines))
    assert sorted(hit.line for hit in scan(tmp_path / "log")) == [1, 2, 3, 4, 5]


@pytest.mark.process
def test_every_flag_is_explained() -> None:
    done = subprocess.run([sys.executable, "-m", "megaresume", "doctor", "--help"], capture_output=True, text=True)
    flags = re.findall(r"^  (--[a-z][a-z-]+)", done.stdout, flags=re.MULTILINE)
    assert len(flags) == 6
    for flag in flags:
        assert f"`{flag}" in TEXT, flag
