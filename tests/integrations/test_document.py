"""The program of docs/deepspeed.md, as it stands there: run, killed with SIGKILL, run again, compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megaresume.training.jobs import LocalJob

from .conftest import write_corpus

DOCUMENT = Path(__file__).parents[2] / "docs" / "deepspeed.md"

#: not for the reader: without a GPU, DeepSpeed would compile a collective first; and steps must be slow enough to kill.
PRELUDE = """\
import builtins, time
import deepspeed, torch
def print(text):
    builtins.print(text + "\\n", end="", flush=True)
    time.sleep(0.2)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.set_num_threads(1)
"""


def block(language: str) -> str:
    match = re.search(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert match is not None
    return match[1]


def losses(output: str) -> dict[tuple[str, str], list[str]]:
    """(rank, samples) -> the step and loss of every time that they were trained on."""
    found: dict[tuple[str, str], list[str]] = {}
    for rank, step, samples, loss in re.findall(r"rank (\d+) step (\d+) samples (\[.*?\]) loss (\S+)", output):
        found.setdefault((rank, samples), []).append(f"{step} {loss}")
    return found


def test_at_most_five_lines_are_added() -> None:
    assert 1 <= len(re.findall(r"# \d", block("python"))) <= 5


def test_the_documents_program_killed_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "web", documents=300, seed=1)
    write_corpus(tmp_path / "code", documents=200, seed=2)
    (tmp_path / "data.yaml").write_text(block("yaml"))
    (tmp_path / "ds_config.json").write_text(block("json"))
    (tmp_path / "train.py").write_text(PRELUDE + block("python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def job(output: str) -> LocalJob:
        return LocalJob(str(tmp_path / "train.py"), [], num_processes=2, output=tmp_path / output, launcher="torchrun")

    with job("killed") as killed:
        assert killed.wait_until(lambda: "rank 0 step 6" in killed.text()), killed.text()
        assert killed.kill() >= 3
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step4"
    with job("killed") as resumed:
        assert resumed.wait() == 0, resumed.text()
    assert "megaresume: resumed at sample 32 | digest " in resumed.text()
    assert "| repeated 0 skipped 0 |" in resumed.text()
    (tmp_path / "checkpoints").rename(tmp_path / "other")
    with job("whole") as whole:
        assert whole.wait() == 0, whole.text()

    one, twin = losses((tmp_path / "killed").read_text()), losses(whole.text())
    assert len(twin) == 48 and one.keys() == twin.keys()
    for samples, entries in twin.items():
        # Trained once, or again after the kill: always the same step and the same loss, to the last digit.
        assert set(one[samples]) == set(entries)
