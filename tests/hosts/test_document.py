"""The program of docs/deepspeed.md on two ranks: run, killed with SIGKILL, run again, compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megaresume.cluster.processes import LocalJob
from tests.cli.conftest import megaresume
from tests.release import release

#: not for the reader: without a GPU, DeepSpeed would compile a collective first; and with HOLD it waits to be killed.
PRELUDE = """\
import builtins, os, time
import deepspeed, torch
def print(text, **_):
    builtins.print(text + "\\n", end="", flush=True)
    while "HOLD" in os.environ and text.startswith("step 30 "):
        time.sleep(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.set_num_threads(1)
"""


def steps(text: str) -> list[str]:
    """Its lines of steps and losses, in their order."""
    return re.findall(r"^step \d+ loss \S+$", text, re.MULTILINE)


def test_at_most_five_lines_are_added(tmp_path: Path) -> None:
    megaresume("new", "deepspeed", tmp_path)
    program = (tmp_path / "train.py").read_text()
    assert 1 <= len(re.findall(r"^.*(?:megaresume|next\(data\)).*$", program, re.MULTILINE)) <= 5


@release(
    "two launches and a kill each",
    "`tests/hosts/test_deepspeed.py::test_a_resume_continues_bit_for_bit`, "
    "`tests/hosts/test_deepspeed.py::test_two_ranks_to_one`",
)
@pytest.mark.process
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_documents_program_killed_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    megaresume("new", "deepspeed", tmp_path)
    program = tmp_path / "train.py"
    text = program.read_text().replace("STEPS = 257, 160", "STEPS = 257, 60")
    config = f'"train_batch_size": 8,\n    "gradient_accumulation_steps": {accumulation},'
    text = text.replace('"train_batch_size": 8,', config)
    assert config in text and "STEPS = 257, 60" in text
    program.write_text(PRELUDE + text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def job(output: str, **env: str) -> LocalJob:
        return LocalJob(str(program), [], num_processes=2, output=tmp_path / output, launcher="torchrun", env=env)

    with job("killed", HOLD="1") as killed:
        assert killed.wait_until(lambda: "\nstep 30 " in killed.text()), killed.text()
        assert killed.kill() >= 3
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step20"
    with job("resumed") as resumed:
        assert resumed.wait() == 0, resumed.text()
    assert "megaresume: resumed at sample 160 | digest " in resumed.text()
    assert "| repeated 0 skipped 0 |" in resumed.text()
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("global_step*"))
    assert saved == ["global_step20", "global_step40", "global_step60"]  # each once, and the last one too
    (tmp_path / "checkpoints").rename(tmp_path / "other")
    with job("whole") as whole:
        assert whole.wait() == 0, whole.text()
    expected = steps(whole.text())
    assert [line.split()[1] for line in expected] == [str(step) for step in range(1, 61)]
    assert steps(killed.text()) == expected[:30] and steps(resumed.text()) == expected[20:]
