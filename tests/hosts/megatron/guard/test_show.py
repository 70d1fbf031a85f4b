"""The record for people."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.records.envelope import OpaqueState
from megaresume.checkpoint.save.commit import begin_save, commit_save
from megaresume.hosts.megatron.guard.compare import describe
from tests.hosts.megatron.guard.conftest import Corpora, Run
from tests.hosts.megatron.guard.loads import order_state

pytestmark = pytest.mark.process


def save_order(root: Path, content: dict[str, Any], samples: int) -> OpaqueState:
    """A checkpoint under guard."""
    state, tag = order_state(content, samples), "iter_0000100"
    pending = begin_save(root, tag=tag, iteration=100, state=state, latest=False)
    (root / tag).mkdir()
    (root / tag / "model_optim_rng.pt").write_bytes(b"weights")
    commit_save(pending)
    return state


def test_inspect_shows_the_order(build: Run, corpora: Corpora, tmp_path: Path) -> None:
    spec: dict[str, Any] = {"paths": corpora.paths, "weights": [0.6, 0.3, 0.1]}
    base = build(**spec)
    longer = build(**spec, sizes=[700, 20, 20], loaded=base["payload"], samples=200)
    state = save_order(tmp_path / "save", longer["payload"], 200)
    said = "\n".join(describe(state))
    assert "recorded from the first sample" in said
    assert "train: pinned for 300 samples, blend of 700" in said
    assert f"{corpora.path('a')}: documents 0:64 of 80" in said and "further epoch" in said
    for flags in ([], ["--json"]):
        command = [sys.executable, "-m", "megaresume", "inspect", str(tmp_path / "save"), *flags]
        out = subprocess.run(command, capture_output=True, text=True).stdout
        assert (json.loads(out)["order"] == longer["payload"]) if flags else (said in out), out


def test_checkpoints_under_guard(build: Run, corpora: Corpora, tmp_path: Path) -> None:
    """They are complete or not, as any other; what they train cannot be planned again without Megatron."""
    save_order(tmp_path, build(paths=corpora.paths)["payload"], 200)

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "megaresume", *words], capture_output=True, text=True)

    done = command("inspect", str(tmp_path))
    assert done.returncode == 0 and "resumes from iter_0000100, at sample 200, under guard" in done.stdout, done.stdout
    done = command("verify", str(tmp_path))
    assert done.returncode == 1 and "the run is under guard" in done.stderr and "inspect" in done.stderr, done.stderr
    (tmp_path / "iter_0000100" / "model_optim_rng.pt").write_bytes(b"weight")
    assert command("inspect", str(tmp_path)).returncode == 1


def test_the_record_is_small_and_plain(build: Run, corpora: Corpora) -> None:
    base = build(paths=corpora.paths, weights=[0.6, 0.3, 0.1])
    text = json.dumps(base["payload"])
    assert json.loads(text) == base["payload"]
    assert len(text) < 600 * 9 + 1000, "nine corpora in splits, some hundred bytes each"
