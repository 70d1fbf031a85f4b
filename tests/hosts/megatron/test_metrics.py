"""Live figures under Megatron-LM's own loop, by a flag: every save has counted what its samples hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.step_file import read_step_file

pytest.importorskip("megatron.core")

SIZES = ["--seed", 7, "--seq-length", 32, "--vocab-size", 65, "--train-iters", 10, "--global-batch-size", 8]


def test_figures_by_a_flag(mini: Any, data_yaml: Path, tmp_path: Path) -> None:
    where = ["--save", tmp_path / "save", "--load", tmp_path / "save", "--save-interval", 3, "--ckpt-format", "torch"]
    flags = ["--megaresume-data", data_yaml, *SIZES, *where, "--megaresume-metrics", "jsonl", "every=0.05"]
    first = mini(*flags, "--micro-batch-size", 2, env={"MINI_KILL": "step:8"})
    assert first.status == -9, first.output
    second = mini(*flags, "--micro-batch-size", 1)
    assert second.status == 0, second.output
    lines = [json.loads(line) for line in (tmp_path / "save/megaresume/meter/run.jsonl").open()]
    assert [line["step"] for line in lines if line["event"] == "start"] == [0, 6]
    saves = [line for line in lines if line["event"] == "save"]
    assert [line["step"] for line in saves] == [3, 6, 9, 10]
    for line in saves:
        assert line["samples"] == 8 * line["step"]
        state = read_step_file(tmp_path / f"save/megaresume/step_{line['step']:07d}.json").stream
        assert sum(line["counts"]["tokens"].values()) == state.tokens
        assert sum(line["counts"]["documents"].values()) == state.documents
