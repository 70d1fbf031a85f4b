"""launch/slurm/train.sbatch comes back where it should, and not for ever; a program that only ends is enough."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megaresume.smoke.scripts import launch_script

if TYPE_CHECKING:
    from tests.launch.conftest import Cluster

#: in the place of PYTHON: has every module, and ends as it is told.
PROGRAM = '#!/bin/bash\n[[ $1 == -c ]] || { echo "exits with status 0, not finished"; exit "$END_WITH"; }\n'
#: in front of Slurm's own: a controller that is being restarted, when it is asked the first time.
SCONTROL = """#!/bin/bash
if [[ $1 == requeue && ! -e $AWAY ]]; then
  touch "$AWAY"
  echo "scontrol: error: Unable to contact slurm controller (connect failure)" >&2
  exit 1
fi
exec PATH_OF_SCONTROL "$@"
"""


def submit(slurm: Cluster, directory: Path, script: Path, **env: str) -> str:
    (directory / "python").write_text(PROGRAM)
    (directory / "python").chmod(0o755)
    (directory / "data.yaml").touch()
    settings = {"PYTHON": str(directory / "python"), "PROCS_PER_NODE": "1", "LAUNCHER": "srun"} | env
    # A name that has to be quoted everywhere.
    settings["RUN_DIR"] = str(directory / "a run, 'mine'")
    words = ["sbatch", "--parsable", "--nodes=1", "--time=10", str(script), "--note", "two words"]
    done = subprocess.run(words, cwd=directory, env=slurm.env | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def said(directory: Path, words: str, *, seconds: float = 120) -> list[str]:
    """All decisions, once one of them has these words."""
    log = directory / "a run, 'mine'" / "logs" / "batch.log"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        lines = log.read_text().splitlines() if log.exists() else []
        if any(words in line for line in lines):
            return lines
        time.sleep(0.1)
    pytest.fail(f"not within {seconds} s: {words}; {lines}")


def test_a_chain_whose_length_stands_in_the_script_comes_to_an_end(slurm: Cluster, tmp_path: Path) -> None:
    text = launch_script("slurm/train.sbatch").read_text()
    # As a user edits it: every job of the chain has this line.
    for setting in ("CHAIN=${CHAIN:-0}", "REQUEUE=${REQUEUE:-yes}"):
        assert text.count(setting) == 1
    script = tmp_path / "train.sbatch"
    script.write_text(text.replace("CHAIN=${CHAIN:-0}", "CHAIN=1").replace("REQUEUE=${REQUEUE:-yes}", "REQUEUE=no"))
    submit(slurm, tmp_path, script, END_WITH="0")
    try:
        lines = said(tmp_path, "and no job follows, CHAIN=0")
        assert sum(" start: " in line for line in lines) == 2
    finally:
        slurm.slurm("scancel", "--name=megaresume")


def test_a_controller_that_is_away_when_the_job_is_to_be_queued_again(slurm: Cluster, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    real = subprocess.run(["bash", "-c", "command -v scontrol"], capture_output=True, text=True).stdout.strip()
    (tools / "scontrol").write_text(SCONTROL.replace("PATH_OF_SCONTROL", real))
    (tools / "scontrol").chmod(0o755)
    away = {"PATH": f"{tools}:{slurm.env['PATH']}", "AWAY": str(tmp_path / "away")}
    job = submit(slurm, tmp_path, launch_script("slurm/train.sbatch"), END_WITH="3", **away)
    try:
        lines = said(tmp_path, "queued again")
        assert (tmp_path / "away").exists()
        assert "attempt 0] queued again: failed with status 3, failure 1" in lines[-1]
    finally:
        slurm.slurm("scancel", job)
