"""Balanced ranks in the reference program: the same losses as without, killed and on another topology too."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megaresume.program import main
from tests.release import release

SIZES = "--train-iters 6 --global-batch-size 8 --zero-stage 0 --save {dir}/balanced --load {dir}/balanced"


@release(
    "three launches of DeepSpeed",
    "`tests/hosts/torch/test_balance.py::test_nothing_is_repeated_and_nothing_skipped`, "
    "`tests/hosts/torch/test_balance.py::test_trace_knows_who_trained_what`: the same deal in a loop of torch",
)
def test_killed_and_resumed_on_one_rank(runs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    plain = runs("plain", "--train-iters 6 --global-batch-size 8 --micro-batch-size 2 --zero-stage 0")
    assert plain.status == 0, plain.text[-4000:]
    balance = "--megaresume-balance step --megaresume-balance-token-cost 100"
    runs("balanced", f"{SIZES} --save-interval 2 --micro-batch-size 2 {balance}", kill_after=5)
    other = runs("balanced", f"{SIZES} --micro-batch-size 1 --megaresume-balance micro-step", num_processes=1)
    assert other.status == 0, other.text[-4000:]
    assert "| dp 2->1 workers 0->0 mbs 2->1 gbs 8->8 | repeated 0 skipped 0 |" in other.resumed
    steps = other.records.steps
    assert sorted(steps) == [1, 2, 3, 4, 5, 6] and [steps[n]["samples"] for n in sorted(steps)] == [
        [8 * k, 8 * k + 8] for k in range(6)
    ]
    for step, record in steps.items():
        assert record["loss"] == pytest.approx(plain.records.steps[step]["loss"], rel=1e-5), step

    save = plain.log.with_name("balanced")
    assert main(["verify", str(save), "--log-samples", str(other.log)]) == 0
    assert main(["trace", str(save), "--samples", "0:48", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    first = [row for row in rows if row["sample"] < 32]
    assert sorted((row["step"], row["rank"], row["micro_batch"]) for row in first) == [
        (step, rank, k) for step in range(1, 5) for rank in (0, 1) for k in (0, 0, 1, 1)
    ]
    assert [row["rank"] for row in first] != [sample // 2 % 2 for sample in range(32)]
