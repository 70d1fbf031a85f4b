"""`megaresume.attach` in VeRL's own SFTTrainer on gloo: killed, and resumed by other batches and data.

What the trainer trained it writes down itself: `program.py`.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from megaresume.program import main
from tests.hosts.torch.record import ended, items, launch, lines, refused, trained
from tests.release import release

PROGRAM = Path(__file__).with_name("program.py")


run = functools.partial(ended, PROGRAM)
refusal = functools.partial(refused, PROGRAM)


@pytest.fixture(scope="module")
def killed(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, killed in the second of three epochs: in the middle of the save of step 24."""
    directory = tmp_path_factory.mktemp("killed") / "run"
    done = launch(PROGRAM, directory, 2, python=python, kill=24)
    assert done.returncode != 0 and "SIGKILL" in done.stderr, done.stderr[-6000:]
    assert (directory / "global_step_24").is_dir()
    return directory


@pytest.fixture(scope="module")
def whole(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank that nobody stops: three epochs, without the four items that are no whole step."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    run(python, directory, 1)
    return directory


@release(
    "VeRL, which no extra installs; three launches of it",
    "`tests/hosts/verl/test_parts.py::test_its_end_with_another_batch_size`, "
    "`tests/hosts/contract/test_loop.py`: the same feed, steps and session",
)
def test_killed_in_a_save_and_resumed(python: str, copy: Path, order: list[int]) -> None:
    """It ends after three epochs, and keeps as many checkpoints as VeRL's own setting says."""
    said = run(python, copy, 2, attempt=2, step=16, workers=2, config=["trainer.max_ckpt_to_keep=1"])
    assert "passed over global_step_24" in said
    handed = items(trained(copy))
    assert handed[:296] == order[: len(handed)] and len(handed) == 128 + 10 * 16 > 300 - 16
    assert main(["verify", str(copy)]) == 0
    assert [path.name for path in copy.glob("global_step_*")] == ["global_step_26"]


@release(
    "VeRL: four launches",
    "`tests/hosts/verl/test_parts.py::test_what_is_refused`",
)
def test_what_is_refused(python: str, copy: Path, tmp_path: Path) -> None:
    assert "the weights in global_step_16 are from a different number of ranks" in refusal(python, copy, 1, attempt=2)
    (copy / "global_step_16" / "data_0.pt").unlink()
    (copy / "global_step_8" / "data_0.pt").write_bytes(b"")
    said = refusal(python, copy, 2, attempt=2)
    assert "data_0.pt" in said and "is complete" in said
    assert len([line for line in lines(copy) if line["attempt"] == 2]) == 0
    # Written without megaresume.
    other = tmp_path / "other"
    run(python, other, 1, attached=False, epochs=1)
    assert "the checkpoint has no data state" in refusal(python, other, 1, attempt=2)
