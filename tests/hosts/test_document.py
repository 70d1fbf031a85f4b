"""The program of docs/deepspeed.md, as it stands there: run, killed with SIGKILL, run again, compared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megaresume.cluster.local import LocalJob
from megaresume.program import main
from tests.release import release

DOCUMENT = Path(__file__).parents[2] / "docs" / "deepspeed.md"

#: not for the reader: without a GPU, DeepSpeed would compile a collective first; and with HOLD it waits to be killed.
PRELUDE = """\
import builtins, os, time
import deepspeed, torch
def print(text):
    builtins.print(text + "\\n", end="", flush=True)
    while "HOLD" in os.environ and " step 6 " in text:
        time.sleep(1)
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


def write_corpora(directory: Path) -> None:
    """As a newcomer does: `megaresume prepare` with its default tokenizer, of 257 ids, and an end of every document."""
    for name, documents in (("web", 300), ("code", 200)):
        texts = [f"{name} {number} " * (1 + number % 9) for number in range(documents)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        assert main(["prepare", f"{directory / name}.jsonl", "--output", str(directory / name), "--workers", "1"]) == 0


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
    write_corpora(tmp_path)
    (tmp_path / "data.yaml").write_text(block("yaml"))
    config = json.loads(block("json")) | {"train_batch_size": 4 * accumulation}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    (tmp_path / "train.py").write_text(PRELUDE + block("python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def job(output: str, **env: str) -> LocalJob:
        program = str(tmp_path / "train.py")
        return LocalJob(program, [], num_processes=2, output=tmp_path / output, launcher="torchrun", env=env)

    with job("killed", HOLD="1") as killed:
        assert killed.wait_until(lambda: "rank 0 step 6" in killed.text()), killed.text()
        assert killed.kill() >= 3
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step4"
    with job("killed") as resumed:
        assert resumed.wait() == 0, resumed.text()
    assert f"megaresume: resumed at sample {16 * accumulation} | digest " in resumed.text()
    assert "| repeated 0 skipped 0 |" in resumed.text()
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("global_step*"))
    assert saved == ["global_step12", "global_step4", "global_step8"]  # each once, and the last one too
    (tmp_path / "checkpoints").rename(tmp_path / "other")
    with job("whole") as whole:
        assert whole.wait() == 0, whole.text()

    one, twin = losses((tmp_path / "killed").read_text()), losses(whole.text())
    assert len(twin) == 24 * accumulation and one.keys() == twin.keys()
    for samples, entries in twin.items():
        # Trained once, or again after the kill: always the same step and the same loss, to the last digit.
        assert set(one[samples]) == set(entries)
