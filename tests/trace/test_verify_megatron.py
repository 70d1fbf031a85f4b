"""What Megatron-LM's loop was handed, as every rank wrote it down, against the plan: kills, layouts, micro-batches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import data_yaml as data_yaml
from tests.hosts.megatron.conftest import mini as mini

pytest.importorskip("megatron.core")

SIZES = ["--seed", 7, "--seq-length", 32, "--vocab-size", 65, "--train-iters", 8, "--global-batch-size", 8]


def verify(*words: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "megaresume", "verify", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if found["holds"] else 1)
    return found


def test_every_rank(mini: Any, data_yaml: Path, tmp_path: Path) -> None:
    save, logs = tmp_path / "save", tmp_path / "logs"
    flags = ["--megaresume-data", data_yaml, *SIZES, "--save", save, "--load", save, "--save-interval", 3]
    flags += ["--ckpt-format", "torch", "--megaresume-log-samples", logs]
    first = mini(*flags, "--micro-batch-size", 2, env={"MINI_KILL": "step:5"})
    assert first.status == -9, first.output
    second = mini(*flags, "--micro-batch-size", 4, "--num-workers", 1, num_processes=1)
    assert second.status == 0, second.output
    assert sorted(path.name for path in logs.iterdir()) == ["rank_00000.jsonl", "rank_00001.jsonl"]
    log = verify(save, "--log-samples", logs, "--content")["log"]
    # Steps 1 to 3 of two ranks, 4 to 8 of one; of the step that the kill cut short a rank may have a line, or not.
    assert log["holds"] and log["steps"] == 8 and log["lines"] == log["contents"] == 2 * 3 + 5
    assert 2 <= log["lost"] <= 4 and log["given_up"] == 0
