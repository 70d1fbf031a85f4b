"""Machines that share no disk: their parts in a store, killed at any time; see nodes.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.release import release

pytestmark = pytest.mark.process
REPOSITORY = Path(__file__).parents[3]


def _tries(*words: str) -> str:
    pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    command = [sys.executable, "-m", "tests.checkpoint.store.nodes", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_killed_on_any_node_at_any_time() -> None:
    assert "tries, 0 lost" in _tries("--count", "3", "--seed", "2")


@release(
    "150 starts of up to three nodes that are killed, which takes half an hour",
    "`tests/checkpoint/store/test_nodes.py::test_killed_on_any_node_at_any_time`, of some",
)
def test_killed_on_any_node_at_any_time_150_times() -> None:
    assert "tries, 0 lost" in _tries("--count", "150", "--seed", "1")
