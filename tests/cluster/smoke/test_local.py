"""The real thing on this machine: our launch scripts, DeepSpeed engines, Megatron's loop; real kills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.smoke.conftest import ROOT, costs_steps, smoke
from tests.release import release

pytestmark = pytest.mark.process

pytest.importorskip("megatron.core")

MINI = ROOT / "tests" / "hosts" / "megatron" / "mini"


@release(
    "four launches of two ranks",
    "`tests/cluster/launch/test_smoke_slurm.py::test_a_killed_rank_with_zero_1`",
)
def test_torchrun_on_two_nodes_and_one(tmp_path: Path) -> None:
    kinds = ["sigkill", "node-down"]  # sigterm: tests/cluster/launch/test_scripts.py
    layouts = ["--nodes", "2,1", "--workers", "0,1", "--micro-batch-size", "2,4"]
    status, result, text = smoke(tmp_path, "--kill", ",".join(kinds), *layouts)
    assert status == 0 and result["holds"] and result["verified"], text
    assert result["where"] == "processes of one machine"
    stops = result["stops"]
    assert [stop["kind"] for stop in stops] == kinds
    assert [stop["before"]["nodes"] for stop in stops] == [2, 1]
    assert [(s["after"]["nodes"], s["after"]["workers"], s["after"]["micro_batch_size"]) for s in stops] == [
        (1, 1, 4),
        (2, 0, 2),
    ]
    for stop in stops:
        assert stop["lost"] == stop["step"] - stop["resumed_from"]
        assert 0 < stop["data_seconds"] < stop["seconds"]
    assert costs_steps(result, "sigkill") and costs_steps(result, "node-down")
    compared = result["comparison"]
    assert compared["steps"] == compared["compared"] == compared["hashed"] == 24
    assert compared["trained_again"] == sum(stop["lost"] for stop in stops)
    # Up to the first resume the layout is that of the reference.
    losses = compared["losses"]
    assert losses["exact"] == losses["exact_equal"] == stops[0]["resumed_from"] and losses["largest"] < 1e-4
    records = [json.loads(line) for line in (tmp_path / "out" / "run" / "records").read_text().splitlines()]
    assert [r["topology"]["world_size"] for r in records if r["event"] == "start"] == [2, 1, 2]
    # A step lasts as long as the flag says, and knows how long it waited for its data.
    steps = [record for record in records if record["event"] == "step"]
    assert all(record["seconds"] >= 0.3 > 0 < record["data_seconds"] < record["seconds"] for record in steps)
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 1 and "http" not in page.replace("http://www.w3.org", "")


@release(
    "three launches",
    "`tests/cluster/launch/test_smoke_slurm.py::test_a_killed_rank_with_zero_1`, and DeepSpeed's launcher in "
    "`tests/cluster/launch/test_scripts.py::test_deepspeed_is_started_again_after_a_failure_and_stopped`",
)
def test_deepspeed_launcher_with_its_own_data(tmp_path: Path) -> None:
    from tests.cluster.training.conftest import write_corpus

    write_corpus(tmp_path / "web", documents=300, seed=1)
    data = tmp_path / "data.yaml"
    data.write_text("seed: 1\nseq_length: 64\npacking: best_fit\nsources:\n  web: {path: web}\n")
    flags = ["--launch", "deepspeed", "--nodes", 1, "--ranks-per-node", "2,1", "--workers", 0, "--zero-stage", 2]
    script = (ROOT / "launch" / "deepspeed.sh").read_text()
    # As a user edits it: a model, and the vocabulary of a corpus that does not tell it.
    script = script.replace("--num-layers 12 --hidden-size 768 --num-attention-heads 12", SMALL)
    sizes = [
        "--steps",
        12,
        "--min-step-seconds",
        0.3,
        "--micro-batch-size",
        "2,4",
        "--global-batch-size",
        8,
        "--data",
        data,
    ]
    status, result, text = smoke(tmp_path, "--kill", "walltime", *flags, *sizes, script=script)
    assert status == 0 and result["holds"] and result["verified"], text
    (stop,) = result["stops"]
    assert stop["lost"] == 0 and stop["after"]["ranks_per_node"] == 1 and stop["after"]["micro_batch_size"] == 4


SLOWER = """
import functools
import time

quick = forward_step


@functools.wraps(quick)
def forward_step(*args, **more):
    time.sleep(0.05)
    return quick(*args, **more)

"""
SMALL = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --vocab-size 256"


@release(
    "two launches of Megatron-LM",
    "`tests/cluster/launch/test_smoke_slurm.py::test_a_killed_rank_with_zero_1`, "
    "`tests/cluster/smoke/test_faults.py::test_a_good_program_holds`",
)
def test_a_megatron_script(tmp_path: Path) -> None:
    from tests.cluster.training.conftest import write_corpus

    write_corpus(tmp_path / "web", documents=300, seed=1)
    data = tmp_path / "data.yaml"
    data.write_text("seed: 1\nseq_length: 32\npacking: best_fit\nsources:\n  web: {path: web}\n")
    # The stand-in for Megatron's training package has no --log-interval, and prints no losses.
    program = (MINI / "pretrain_from_0_19.py").read_text()
    more = 'lambda parser: parser.add_argument("--log-interval", type=int) and parser'
    program = program.replace("extra_args_provider=None", f"extra_args_provider={more}")
    # It is faster than a kill.
    program = program.replace("\n\ndef train_valid", SLOWER + "\n\ndef train_valid")
    (tmp_path / "pretrain_gpt.py").write_text(program)
    text = (ROOT / "launch" / "torchrun.sh").read_text()
    before, _, after = text.partition("TRAIN=(\n")
    flags = "--seed 1 --seq-length 32 --vocab-size 256 --ckpt-format torch --lr 0.1"
    train = f'TRAIN=(-m megaresume.run {tmp_path}/pretrain_gpt.py --megaresume-data "$DATA" {flags})\n'
    script = before + train + after.partition("\n)\n")[2]
    sizes = ["--micro-batch-size", "2,4", "--global-batch-size", 8, "--steps", 40, "--save-interval", 10]
    path = {"PYTHONPATH": f"{ROOT}:{MINI}", "TORCHDYNAMO_DISABLE": "1"}
    layouts = ["--ranks-per-node", "2,1", "--data", data]
    status, result, text = smoke(tmp_path, "--kill", "sigkill", *layouts, *sizes, script=script, **path)
    assert status == 0 and result["holds"] and result["verified"], text
    (stop,) = result["stops"]
    assert stop["resumed_from"] % 10 == 0 and stop["after"]["micro_batch_size"] == 4
    compared = result["comparison"]
    # Hashes of ranks say the same only as long as the layout is the same; verify compares the others.
    assert compared["compared"] == 40 and compared["hashed"] == stop["resumed_from"]


@release(
    "four launches",
    "`tests/cluster/training/test_vlm.py::test_killed_and_resumed_on_another_topology`",
)
def test_images(tmp_path: Path) -> None:
    status, result, text = smoke(tmp_path, "--model", "vlm", "--kill", "preempt,node-down", "--zero-stage", 1)
    assert status == 0 and result["holds"] and result["verified"], text
