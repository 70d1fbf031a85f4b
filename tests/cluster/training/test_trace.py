"""A trace of the directory that the training program wrote is what its log says was trained: identities in order,
layouts, batch sizes, through a stage, two kills and a branch that was given up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from megaresume.program import main

BEGIN = "seed: 1234\nseq_length: 64\npacking: {mode: best_fit, open_bins: 8}\nsources:\n"
SOURCES = "  web: {{path: web, weight: {}}}\n  code: {{path: code, weight: {}}}\n"


def test_the_log_of_a_run(runs: Any, data_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = data_yaml.with_name("traced.yaml"), data_yaml.with_name("traced_after.yaml")
    before.write_text(BEGIN + SOURCES.format(0.7, 0.3))
    after.write_text(BEGIN.replace("best_fit, open_bins: 8", "split") + SOURCES.format(0.2, 0.8))
    save = runs.directory / "traced"
    flags = "--train-iters 10 --save {dir}/traced --load {dir}/traced --save-interval 2"
    old, new = f"--megaresume-data {before}", f"--megaresume-data {after} --megaresume-on-change stage"
    runs("traced", f"{flags} --global-batch-size 4 --micro-batch-size 2", kill_after=5, data=old)
    (save / "latest").write_text("global_step2")  # step 4 is given up
    (save / "latest_checkpointed_iteration.txt").write_text("2")
    runs("traced", f"{flags} --global-batch-size 4 --micro-batch-size 1", num_processes=1, kill_after=7, data=new)
    last = runs("traced", f"{flags} --global-batch-size 8 --micro-batch-size 1", data=new)
    assert last.status == 0, last.text[-4000:]
    assert main(["trace", str(save), "--steps", "1:11", "--json"]) == 0
    steps: dict[int, list[dict[str, Any]]] = {}
    for line in capsys.readouterr().out.splitlines():
        row = json.loads(line)
        steps.setdefault(row["step"], []).append(row)
    logged = last.records.steps
    assert sorted(steps) == sorted(logged) == list(range(1, 11))
    for step, record in logged.items():
        rows = steps[step]
        assert [rows[0]["sample"], rows[-1]["sample"] + 1] == record["samples"]
        identities = np.array([int(row["hash"], 16) for row in rows], np.uint64)
        assert xxhash.xxh3_64_hexdigest(identities.tobytes()) == record["order"], step
        dp, micro = record["dp"], record["micro_batch_size"]
        places = [(k // micro % dp, k // (dp * micro)) for k in range(record["global_batch_size"])]
        assert [(row["rank"], row["micro_batch"]) for row in rows] == places, step
    layouts = {(r["dp"], r["micro_batch_size"], r["global_batch_size"]) for r in logged.values()}
    assert len(layouts) == 3
