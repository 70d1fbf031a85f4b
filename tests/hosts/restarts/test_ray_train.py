"""Ray Train's elastic scaling: the loop of `program.py` on two workers, one, two, as nodes of a cluster go and come."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.environments import make_environment
from tests.hosts.restarts.program import GLOBAL, judge
from tests.hosts.torch.record import ENVIRONMENT, launch
from tests.release import release

PROGRAM = Path(__file__).with_name("program.py")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An environment that has Ray, and sees the packages of the running one: that of MEGARESUME_RAY_PYTHON, or one that
    is made here."""
    if given := os.environ.get("MEGARESUME_RAY_PYTHON"):
        return given
    return str(make_environment(tmp_path / "venv", "-c", ROOT / "constraints.txt", "ray[train]==2.60.0"))


@release(
    "Ray, which no extra installs: a cluster of two nodes, and three starts of workers",
    "`tests/cluster/training/test_restart_in_place.py::test_nodes_are_lost_and_won`",
)
def test_a_node_is_lost_and_one_comes(python: str, tmp_path: Path) -> None:
    options = json.dumps({"steps": 4000, "save_every": 3, "seconds": 0.2})
    env = os.environ | ENVIRONMENT | {"RAY_TRAIN_V2_ENABLED": "1", "RAY_worker_register_timeout_seconds": "300"}
    words = [python, str(PROGRAM.with_name("ray_train.py")), str(tmp_path / "job"), options]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (said,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"reached"'))
    found, reached = judge(tmp_path / "job"), said["reached"]
    whole = launch(PROGRAM, tmp_path / "whole", 1, steps=reached, save_every=reached)
    assert whole.returncode == 0, whole.stderr[-3000:]
    expected = judge(tmp_path / "whole")
    for step in range(1, reached + 1):
        assert len(found.steps[step]) == GLOBAL and found.steps[step] == expected.steps[step], step
        assert found.weights[step] == pytest.approx(expected.weights[step], rel=1e-5), step
    assert set(found.ranks.values()) == {1, 2} and found.again
