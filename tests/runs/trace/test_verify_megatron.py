"""What Megatron-LM's loop was handed, as every rank wrote it down, against the plan: kills, layouts, micro-batches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from megaresume.data.split import IndexedSource
from tests.corpora import write_spans
from tests.hosts.conftest import data_yaml as data_yaml
from tests.hosts.conftest import write_corpus
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


def trace(*words: object) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "megaresume", "trace", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


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


def test_balanced_ranks_of_a_filled_blend(mini: Any, tmp_path: Path) -> None:
    """Conversations with spans and text that fills, ranks balanced, in a ramp-up; killed, and on one rank then.

    What the scripts were handed, by their own log, is what ``trace`` deals out: another reading of the corpora.
    """
    write_corpus(tmp_path / "text", documents=200, seed=1)
    write_corpus(tmp_path / "chat", documents=200, seed=2, mean=12)
    lengths = IndexedSource(tmp_path / "chat").lengths(np.arange(200)).tolist()
    write_spans(tmp_path / "chat", lengths, [[(n // 2, n)] for n in lengths])
    data = tmp_path / "data.yaml"
    data.write_text("seq_length: 32\nsources:\n  text: {path: text, packing: split}\n  chat: {path: chat, weight: 2}\n")
    save, logs = tmp_path / "save", tmp_path / "logs"
    flags = ["--megaresume-data", data, *SIZES, "--save", save, "--load", save, "--save-interval", 3]
    flags += ["--rampup-batch-size", 4, 4, 12, "--ckpt-format", "torch", "--megaresume-log-samples", logs]
    flags += ["--split", "1,0,0", "--eval-iters", 0, "--megaresume-balance-token-cost", 0, "--megaresume-balance"]
    first = mini(*flags, "step", "--micro-batch-size", 1, "--num-workers", 1, env={"MINI_KILL": "step:5"})
    assert first.status == -9, first.output
    second = mini(*flags, "micro-step", "--micro-batch-size", 2, num_processes=1)
    assert second.status == 0, second.output

    handed: dict[tuple[int, int, int], list[str]] = {}
    for run in (first, second):
        rows = [row for row in run.rows() if "iteration" in row and (run is second or row["iteration"] <= 3)]
        handed |= {(row["iteration"], row["dp"], k): hashes for row in rows for k, hashes in enumerate(row["micro"])}
    sources = {name: IndexedSource(tmp_path / name) for name in ("text", "chat")}
    dealt: dict[tuple[int, int, int], dict[int, str]] = {}
    for row in trace(save, "--steps", "1:9"):
        tokens = np.zeros(32, np.int64)
        for s in row["segments"]:
            tokens[s["place"] : s["place"] + s["length"]] = sources[s["source"]].read(
                s["document"], s["offset"], s["length"]
            )
        key = row["step"], row["rank"], row["micro_batch"]
        dealt.setdefault(key, {})[row["sample"]] = xxhash.xxh3_64_hexdigest(tokens.tobytes())
    assert {key: sorted(row.values()) for key, row in dealt.items()} == {k: sorted(v) for k, v in handed.items()}
    # Steps of 4, 4, 4, 8, 8, ... samples; those of a rank are not the ones that the stream's own order gives it.
    assert [sum(len(row) for key, row in dealt.items() if key[0] == step) for step in (1, 3, 4, 8)] == [4, 4, 8, 8]
    assert any(sample % 2 != key[1] for key, row in dealt.items() if key[0] <= 3 for sample in row)
    log = verify(save, "--log-samples", logs, "--content")["log"]
    assert log["holds"] and log["steps"] == 8 and log["lines"] == log["contents"] == 2 * 3 + 5
    lines = [json.loads(line) for path in logs.iterdir() for line in path.read_text().splitlines()]
    assert all(line["masks"] for line in lines if line["event"] == "step")
    assert {line["balance"]["objective"] for line in lines if line["event"] == "start"} == {"step", "micro-step"}
