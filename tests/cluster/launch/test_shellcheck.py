"""The scripts of launch/: nothing that shellcheck would say, and what two of them share is the same in both."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaresume.shipped import launch_dir, launch_script

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted(path for path in launch_dir().rglob("*") if path.suffix in (".sh", ".sbatch"))


def test_shellcheck_is_content(shellcheck: str) -> None:
    assert {path.name for path in SCRIPTS} >= {"torchrun.sh", "deepspeed.sh", "train.sbatch"}
    done = subprocess.run([shellcheck, "--shell=bash", *SCRIPTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _between(script: str, first: str, last: str) -> str:
    text = launch_script(script).read_text()
    return text[text.index(first) : text.index(last) if last else None]


@pytest.mark.parametrize(
    ("one", "other", "first", "last", "lines"),
    [
        ("torchrun.sh", "deepspeed.sh", "# What is trained.", "# ==== nothing below", 12),
        ("torchrun.sh", "slurm/train.sbatch", "TRAIN=(", "  # --bf16", 6),
    ],
)
def test_what_two_scripts_share_is_the_same(one: str, other: str, first: str, last: str, lines: int) -> None:
    ours, theirs = _between(one, first, last), _between(other, first, last)
    assert ours == theirs
    assert ours.count("\n") >= lines


def test_the_batch_script_is_read_on_one_screen() -> None:
    assert len(launch_script("slurm/train.sbatch").read_text().splitlines()) <= 60


@pytest.mark.parametrize("script", ["torchrun.sh", "deepspeed.sh", "slurm/train.sbatch"])
def test_the_settings_come_first_and_the_environment_wins(script: str) -> None:
    text = launch_script(script).read_text()
    settings = text[text.index("# ==== settings") : text.index("# ==== nothing below needs editing")]
    names = re.findall(r"^([A-Z]\w+)=(.*)$", settings, re.MULTILINE)
    assert {"RUN_DIR", "DATA", "PYTHON", "PROCS_PER_NODE", "MAX_RESTARTS"} <= {name for name, _ in names}
    for name, value in names:
        assert value.startswith(f"${{{name}:-") or name in ("TRAIN", "CONTAINER"), f"{name}={value}"
    # bash loses other signals now and then where CONT, which Slurm sends along, is trapped.
    assert not re.search(r"^\s*trap .*\bCONT\b", text, re.MULTILINE)


def test_an_installed_package_brings_them(tmp_path: Path) -> None:
    build = [
        sys.executable,
        "setup.py",
        "-q",
        "build",
        "--build-base",
        tmp_path / "base",
        "--build-lib",
        tmp_path / "lib",
    ]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    found = subprocess.run(
        [sys.executable, "-m", "megaresume.shipped"],
        cwd=tmp_path / "lib",
        capture_output=True,
        text=True,
        check=True,
    )
    folder = Path(found.stdout.strip())
    assert folder == tmp_path / "lib" / "megaresume" / "cluster" / "launch"
    for path in SCRIPTS:
        copy = folder / path.relative_to(launch_dir())
        assert copy.read_bytes() == path.read_bytes() and copy.stat().st_mode & 0o111, copy
