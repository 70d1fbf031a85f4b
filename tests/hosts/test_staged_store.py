"""A run on a local disk, copied to an S3 server: killed, its machine lost, and resumed exactly on an empty one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.store.recorder import Bucket
from tests.checkpoint.store.server import Server, serving
from tests.corpora import simple_corpus
from tests.release import release

PROGRAM = Path(__file__).with_name("staged.py")

pytestmark = pytest.mark.process


server = pytest.fixture(scope="module")(serving)


def _run(server: Server, where: Path, local: str, shared: str, steps: int, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROGRAM), str(where / "data.yaml"), str(where / local), shared, str(steps), *more]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=1500, env=os.environ | server.environment
    )


def _samples(done: subprocess.CompletedProcess) -> dict[str, str]:
    rows = [line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line.startswith("SAMPLES")]
    return {row[0]: row[1] for row in rows}


@release(
    "five starts of a run on a real server",
    "`tests/hosts/test_staged.py::test_killed_and_its_node_lost`: the same program, copied to a directory, "
    "`tests/checkpoint/store/test_position.py::test_steps_after_the_last_save_are_known_and_lost`: `[1]`, "
    "a machine lost and a store",
)
def test_killed_and_resumed_on_an_empty_machine(server: Server, tmp_path: Path) -> None:
    """The twin is never stopped. The run is killed after a save, resumes, loses its disk, resumes from the store."""
    simple_corpus(tmp_path / "web", [5 + k % 9 for k in range(200)])
    (tmp_path / "data.yaml").write_text(json.dumps({"sources": {"web": {"path": str(tmp_path / "web")}}}))
    twin = _samples(_run(server, tmp_path, "twin", "s3://runs/twin", 10))
    assert len(twin) == 10
    killed = _run(server, tmp_path, "local", "s3://runs/run", 5, "KILL")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    second = _run(server, tmp_path, "local", "s3://runs/run", 8)
    assert second.returncode == 0, second.stderr
    assert "resumed" in second.stdout and sorted(_samples(second)) == ["5", "6", "7", "8"]
    head = Bucket(server.client(), "run").heads()[-1]
    assert sorted(saved["tag"] for saved in head["saves"]) == ["global_step6", "global_step8"]
    assert (head["latest"], head["epoch"]) == ("global_step8", 2)
    shutil.rmtree(tmp_path / "local")
    (tmp_path / "local.alias").unlink()
    third = _run(server, tmp_path, "local", "s3://runs/run", 10)
    assert third.returncode == 0, third.stderr
    assert "global_step8 is brought from s3://runs/run" in third.stdout
    assert {**_samples(killed), **_samples(second), **_samples(third)} == twin
    command = [sys.executable, "-m", "megaresume", "latest", "s3://runs/run"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | server.environment)
    assert said.stdout == "s3://runs/run/global_step10\n"
