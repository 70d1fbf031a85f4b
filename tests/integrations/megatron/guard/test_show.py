"""The record for people."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megaresume.integrations.megatron.guard import describe, read_record, write_record
from tests.integrations.megatron.guard.conftest import Corpora, Run

pytestmark = pytest.mark.process


def test_inspect_shows_the_order(build: Run, corpora: Corpora, tmp_path: Path) -> None:
    spec: dict[str, Any] = {"paths": corpora.paths, "weights": [0.6, 0.3, 0.1]}
    base = build(**spec)
    longer = build(**spec, sizes=[700, 20, 20], loaded=base["payload"], samples=200)
    save = tmp_path / "save"
    path = write_record(save, longer["payload"])
    assert path == save / "megaresume" / "order.json"
    assert read_record(save) == longer["payload"]
    said = "\n".join(describe(longer["payload"]))
    assert "recorded from the first sample" in said
    assert "train: pinned for 300 samples, blend of 700" in said
    assert f"{corpora.path('a')}: documents 0:64 of 80" in said and "further epoch" in said
    for flags in ([], ["--json"]):
        command = [sys.executable, "-m", "megaresume", "inspect", str(save), *flags]
        out = subprocess.run(command, capture_output=True, text=True).stdout
        assert (json.loads(out)["order"] == longer["payload"]) if flags else (said in out), out


def test_checkpoints_under_guard(build: Run, corpora: Corpora, tmp_path: Path) -> None:
    """Nothing says that they were written without megaresume, or that the directory is none of a run."""
    write_record(tmp_path, build(paths=corpora.paths)["payload"])
    (tmp_path / "iter_0000100").mkdir()
    (tmp_path / "iter_0000100" / "model_optim_rng.pt").write_bytes(b"weights")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "megaresume", *words], capture_output=True, text=True)

    for flags in ([], ["--json"]):
        done = command("inspect", str(tmp_path), *flags)
        assert done.returncode == 0 and "without megaresume" not in done.stdout, done.stdout
        assert done.stdout.count("under guard no list of its files is kept") == 2, done.stdout
    done = command("verify", str(tmp_path))
    assert done.returncode == 1 and "the run is under guard" in done.stderr and "inspect" in done.stderr, done.stderr


def test_the_record_is_small_and_plain(build: Run, corpora: Corpora) -> None:
    base = build(paths=corpora.paths, weights=[0.6, 0.3, 0.1])
    text = json.dumps(base["payload"])
    assert json.loads(text) == base["payload"]
    assert len(text) < 600 * 9 + 1000, "nine corpora in splits, some hundred bytes each"


def test_a_damaged_copy(tmp_path: Path) -> None:
    (tmp_path / "megaresume").mkdir()
    (tmp_path / "megaresume" / "order.json").write_text("{")
    out = subprocess.run([sys.executable, "-m", "megaresume", "inspect", str(tmp_path)], capture_output=True, text=True)
    assert "order.json cannot be read" in out.stdout
