"""docs/torch.md: its program, killed and started again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megaresume.checkpoint.choose import choose
from megaresume.checkpoint.ledger import read_ledger
from megaresume.checkpoint.records import ledger_path
from tests.release import release

pytest.importorskip("torch")

DOCUMENT = Path(__file__).parents[2] / "docs" / "torch.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def run(program: Path, directory: str, *, kill_at: int | None = None) -> list[str]:
    """The lines of its steps; killed as soon as it says the step ``kill_at``."""
    # What torchrun sets, of one process, which can be killed alone.
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(program), str(program.with_name(directory))]
    lines: list[str] = []
    with subprocess.Popen(
        command, env=os.environ | env | {"PYTHONPATH": str(DOCUMENT.parents[1])}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if kill_at is not None and line.startswith(f"step {kill_at} "):
                process.kill()
        status = process.wait()
    assert (status == 0) == (kill_at is None), lines
    return lines


@pytest.mark.process
@release(
    "three launches of two ranks",
    "`tests/hosts/torch/test_loop.py::test_the_losses_are_those_of_a_run_that_nobody_stopped`, "
    "`::test_the_stream_of_the_document`",
)
def test_the_program_of_the_document_resumes_bit_for_bit(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(blocks()[0])
    nothing, *whole = run(program, "whole")
    assert nothing.startswith("megaresume: nothing is loaded: no checkpoint in ")
    assert [line.split()[1] for line in whole] == [str(step) for step in range(1, 76)]
    _, *killed = run(program, "cut", kill_at=33)
    assert killed[:33] == whole[:33]
    choice = choose(tmp_path / "cut")
    assert choice is not None and choice.iteration is not None
    resumed = run(program, "cut")
    at = choice.iteration
    (said,) = [line for line in resumed if "resumed at" in line]
    assert f"resumed at sample {4 * at}" in said and "repeated 0 skipped 0" in said and "random state restored" in said
    assert [line for line in resumed if line.startswith("step")] == whole[at:]
    last = choose(tmp_path / "cut")
    assert last is not None and last.manifest is not None and last.manifest.durable and last.manifest.has_checksums
    ledger = read_ledger(ledger_path(tmp_path / "cut")).entries
    assert [(entry.iteration, entry.samples) for entry in ledger if entry.kind == "finished"] == [(75, 300)]


def test_the_stream_of_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.hosts.conftest import write_corpus

    write_corpus(tmp_path / "web", documents=50, seed=1)
    (tmp_path / "data.yaml").write_text("seed: 7\nseq_length: 32\nsources:\n  web: {path: web}\n")
    monkeypatch.chdir(tmp_path)
    import megaresume

    names = {"megaresume": megaresume}
    exec(blocks()[1], names)
    batch = next(iter(names["loader"]))  # type: ignore[call-overload]
    assert batch["samples"].tolist() == [0, 1]
