"""The log of steps, its comparison, the DeepSpeed config, and killing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megaresume.cluster.processes import LocalJob
from megaresume.cluster.records import read_records
from megaresume.cluster.training.launch import parse_arguments
from megaresume.cluster.training.model import deepspeed_config
from megaresume.stream.errors import SetupError, UsageError
from tests.cluster.training.compare import compare

BASE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 2 --megaresume-data d.yaml --lr 0.01"


def line(event: str, step: int, **more: Any) -> str:
    fields = (
        {"samples": [0, 8], "order": "a", "content": "b", "digest": "c", "loss_hex": "d"} if event == "step" else {}
    )
    return json.dumps({"event": event, "step": step, "attempt": 1} | fields | more) + "\n"


def test_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first = [line("start", 0), line("step", 1), line("step", 2), line("step", 3, order="lost")]
    path.write_text("".join([*first, line("start", 2), line("step", 3, order="kept"), '{"event": "st']))
    records = read_records(path)
    assert sorted(records.steps) == [1, 2, 3]
    assert records.steps[3]["order"] == "kept"
    assert [entry["order"] for entry in records.lost] == ["lost"]
    assert len(records.starts) == 2


@pytest.mark.parametrize("field", ["samples", "order", "content", "digest"])
def test_compare_names_the_first_difference(tmp_path: Path, field: str) -> None:
    (tmp_path / "one").write_text(line("step", 1) + line("step", 2) + line("step", 3))
    (tmp_path / "other").write_text(line("step", 1) + line("step", 2, **{field: "x"}) + line("step", 3, order="y"))
    difference = compare(read_records(tmp_path / "one"), read_records(tmp_path / "other"))
    assert difference is not None
    assert (difference.step, difference.field, difference.second) == (2, field, "x")


def test_compare_misses_no_step(tmp_path: Path) -> None:
    (tmp_path / "one").write_text(line("step", 1) + line("step", 2))
    (tmp_path / "other").write_text(line("step", 1))
    difference = compare(read_records(tmp_path / "one"), read_records(tmp_path / "other"))
    assert str(difference) == "step 2: step 2 and None"
    assert compare(read_records(tmp_path / "one"), read_records(tmp_path / "one")) is None


def test_a_file_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("no record\n")
    with pytest.raises(UsageError, match="line 1"):
        read_records(tmp_path / "log")
    with pytest.raises(UsageError, match="cannot be read"):
        read_records(tmp_path / "missing")


def test_the_deepspeed_config() -> None:
    args = parse_arguments(f"{BASE} --train-iters 1 --zero-stage 2 --bf16".split())
    config = deepspeed_config(args, global_batch_size=8, num_parameters=100)
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (8, 2)
    assert config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 100, "allgather_bucket_size": 100}
    assert config["bf16"] == {"enabled": True}
    # DeepSpeed's own default where the model is larger.
    config = deepspeed_config(args, global_batch_size=8, num_parameters=10**9)
    assert config["zero_optimization"]["reduce_bucket_size"] == 500_000_000


@pytest.mark.process
def test_kill_leaves_no_process(tmp_path: Path) -> None:
    """Also the children of children: a launcher's ranks and their workers."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('child', child.pid, flush=True)\ntime.sleep(600)\n"
    )
    with LocalJob(str(script), [], num_processes=1, output=tmp_path / "out", launcher="env") as job:
        assert job.wait_until(lambda: job.text().endswith("\n"), timeout=60)
        child = int(job.text().split()[1])
        assert psutil.pid_exists(child)
        assert job.kill() == 2
    deadline = time.monotonic() + 120
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.process
def test_what_a_dead_rank_leaves_behind_is_ended(tmp_path: Path) -> None:
    """As the process in which megatron-core writes a checkpoint, when its rank is killed."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(sleep, start_new_session=True)\n"
        "print('child', child.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    with LocalJob(str(script), [], num_processes=1, output=tmp_path / "out", launcher="env") as job:
        assert job.wait(60) == -9
        child = int(job.text().split()[1])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@pytest.mark.process
def test_a_job_that_hangs_is_killed_and_said(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    with LocalJob(str(script), [], num_processes=1, output=tmp_path / "out", launcher="env") as job:
        with pytest.raises(SetupError, match="made no progress within 3 seconds"):
            job.wait(3)
        assert not job.running()


@pytest.mark.process
def test_one_failed_rank_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "half.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(600)\n")
    with LocalJob(str(script), [], num_processes=2, output=tmp_path / "out", launcher="env") as job:
        assert job.wait(60) == 7
        assert not job.running()
