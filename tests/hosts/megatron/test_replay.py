"""``megaresume replay`` under Megatron-LM's own loop: its losses and gradient norms again, bit for bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import megaresume
from tests.hosts.megatron.conftest import MINI, SCRIPTS
from tests.release import release
from tests.runs.replay.test_replay import everything

pytest.importorskip("megatron.core")


@release("two ranks, launched by torchrun", "`tests/runs/replay/test_replay.py::test_a_loop`")
def test_twenty_steps(mini: Any, data_yaml: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--megaresume-data", data_yaml, "--seed", 7, "--seq-length", 32, "--vocab-size", 65, "--train-iters", 24]
    flags += ["--global-batch-size", 8, "--micro-batch-size", 2, "--save", run, "--load", run, "--save-interval", 3]
    flags += ["--ckpt-format", "torch", "--megaresume-metrics", "jsonl", "every=0.2"]
    first = mini(*flags)
    assert first.status == 0, first.output
    before = everything(run)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    launch += ["--rdzv-endpoint=localhost:0", "-m", "megaresume.run", str(MINI / SCRIPTS[0]), *map(str, flags)]
    launch += ["--mini-log", str(tmp_path / "log")]
    done = megaresume("replay", run, "--steps", "4:24", "--json", "--", *launch)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["tag"] == "iter_0000003" and answer["holds"]
    assert answer["compared"] == {"samples": 20, "losses": 20, "norms": 20}
    assert [step["step"] for step in answer["steps"]] == [*range(4, 24)]
    assert all(step["bitwise"] and step["same_samples"] for step in answer["steps"])
    assert len({step["loss"] for step in answer["steps"]}) == 20
    trained = [
        json.loads(line) for path in (tmp_path / "log").glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    assert {line["iteration"] for line in trained if "iteration" in line} == {*range(4, 24)}
    assert everything(run) == before
