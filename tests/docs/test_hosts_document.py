"""docs/hosts.md: the whole host that it shows, killed and started again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaresume.checkpoint import choose, read_ledger
from megaresume.checkpoint.paths import ledger_path
from tests.hosts.conftest import write_corpus

pytest.importorskip("torch")
pytestmark = pytest.mark.process

DOCUMENT = Path(__file__).parents[2] / "docs" / "hosts.md"


@pytest.fixture
def train(tmp_path: Path) -> Path:
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(block)
    write_corpus(tmp_path / "web", documents=100, seed=1)
    (tmp_path / "data.yaml").write_text("seed: 7\nseq_length: 32\nsources:\n  web: {path: web}\n")
    return tmp_path / "train.py"


def run(train: Path, save: str, steps: int, *, kill_at: int | None = None) -> list[str]:
    """The lines of its steps; killed as soon as it says the step ``kill_at``."""
    command = [sys.executable, str(train), str(train.with_name("data.yaml")), str(train.with_name(save)), str(steps)]
    env = os.environ | {"PYTHONPATH": str(DOCUMENT.parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    lines: list[str] = []
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if kill_at is not None and line.startswith(f"step {kill_at} "):
                process.kill()
        status = process.wait()
    assert (status == 0) == (kill_at is None), lines
    return lines


def test_the_host_of_the_document_resumes_bit_for_bit(train: Path) -> None:
    nothing, *whole = run(train, "whole", 9)
    assert nothing.startswith("megaresume: nothing is loaded: no checkpoint in ")
    assert [line.split()[1] for line in whole] == [str(step) for step in range(1, 10)]
    _, *killed = run(train, "cut", 9, kill_at=5)
    assert killed[:5] == whole[:5]
    choice = choose(train.with_name("cut"))
    assert choice is not None and choice.iteration is not None
    resumed = run(train, "cut", 9)
    at = choice.iteration
    (said,) = [line for line in resumed if "resumed at" in line]
    assert f"resumed at sample {4 * at}" in said and "repeated 0 skipped 0" in said and "random state restored" in said
    assert [line for line in resumed if line.startswith("step")] == whole[at:]
    last = choose(train.with_name("cut"))
    assert last is not None and last.manifest is not None and last.manifest.durable and last.manifest.has_checksums
    ledger = read_ledger(ledger_path(train.with_name("cut"))).entries
    assert [(entry.iteration, entry.samples) for entry in ledger if entry.kind == "finished"] == [(9, 36)]
