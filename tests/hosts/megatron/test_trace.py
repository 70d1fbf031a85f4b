"""`megaresume trace` on a directory that Megatron-LM's loop wrote: every sample at its place in the micro-batch of its
rank, byte for byte, over kills, two layouts and two micro-batch sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from megaresume.data.catalog import open_sources
from megaresume.data.data_config import DataConfig

pytest.importorskip("megatron.core")

SIZES = ["--seed", 7, "--seq-length", 32, "--vocab-size", 65, "--train-iters", 10, "--global-batch-size", 8]


def trace(*words: object) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "megaresume", "trace", *map(str, words), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_ranks_and_micro_batches(mini: Any, data_yaml: Path, tmp_path: Path) -> None:
    where = ["--save", tmp_path / "save", "--load", tmp_path / "save", "--save-interval", 3, "--ckpt-format", "torch"]
    flags = ["--megaresume-data", data_yaml, *SIZES, *where]
    first = mini(*flags, "--micro-batch-size", 2, env={"MINI_KILL": "step:8"})
    assert first.status == -9, first.output
    second = mini(*flags, "--micro-batch-size", 4, "--exit-interval", 9, num_processes=1)
    assert second.status == 0, second.output
    third = mini(*flags, "--micro-batch-size", 1)
    assert third.status == 0, third.output

    trained: dict[tuple[int, int, int], list[str]] = {}
    for run in (first, second, third):
        for row in run.rows():
            if "iteration" in row:
                for k, micro in enumerate(row["micro"]):
                    trained[row["iteration"], row["dp"], k] = micro
        if run is first:
            # Saved at 6: what came later is of the second run.
            trained = {key: micro for key, micro in trained.items() if key[0] <= 6}
    named = DataConfig.of(data_yaml)
    specs = {name: {"path": options["path"]} for name, options in named.mapping["sources"].items()}
    sources = open_sources(specs, base_dir=named.directory)
    found: dict[tuple[int, int, int], list[str]] = {}
    for row in trace(tmp_path / "save", "--steps", "1:11"):
        tokens = np.zeros(32, np.int64)
        for s in row["segments"]:
            part = sources[s["source"]].read(s["document"], s["offset"], s["length"])
            tokens[s["place"] : s["place"] + s["length"]] = part
        key = row["step"], row["rank"], row["micro_batch"]
        found.setdefault(key, []).append(xxhash.xxh3_64_hexdigest(tokens.tobytes()))
    assert found == trained
    assert {key[1:] for key in found if key[0] in (1, 7, 10)} == {(r, k) for r in (0, 1) for k in range(4)} | {
        (0, 0),
        (0, 1),
    }
