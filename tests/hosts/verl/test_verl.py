"""`megaresume.attach` in VeRL's own SFTTrainer on gloo: killed, and resumed by other batches and data.

What the trainer trained it writes down itself: `program.py`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.program import main
from tests.hosts.torch.record import copied, ended, items, launch, lines, refused, trained
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
def order(python: str, killed: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The items of a run of one rank that nobody stops: three epochs, without the four that are no whole step."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    run(python, directory, 1)
    handed = items(trained(directory))
    assert sorted(handed[:100]) == sorted(handed[100:200]) == list(range(100)) and len(handed) == 296
    assert handed[:100] != handed[100:200] and len(set(handed[200:])) == 96
    return handed


@pytest.fixture
def copy(killed: Path, tmp_path: Path) -> Path:
    """A copy of the killed run."""
    return copied(killed, tmp_path)


@release(
    "VeRL, which no extra installs; five launches of it",
    "`tests/hosts/verl/test_parts.py::test_its_end_with_another_batch_size`, "
    "`tests/hosts/torch/test_loop.py::test_two_ranks_to_one`: the same feed, steps and session",
)
@pytest.mark.parametrize(
    ("step", "steps", "options"),
    [(8, 37, {}), (4, 59, {"workers": 2}), (16, 26, {"config": ["trainer.max_ckpt_to_keep=1"]})],
    ids=["same", "halved", "doubled"],
)
def test_killed_in_a_save_and_resumed(
    python: str, copy: Path, order: list[int], step: int, steps: int, options: Any
) -> None:
    said = run(python, copy, 2, attempt=2, step=step, **options)
    assert f"gbs 8->{step} | repeated 0 skipped 0 | step 16 from global_step_16" in said
    assert "passed over global_step_24" in said
    handed = items(trained(copy))
    assert handed[: min(len(handed), 296)] == order[: len(handed)]
    assert len(handed) == 128 + (steps - 16) * step > 300 - step
    choice = choose(copy)
    assert choice is not None and choice.tag == f"global_step_{steps}"
    finished = [entry for entry in read_ledger(ledger_path(copy)).entries if entry.kind == "finished"]
    assert [(entry.iteration, entry.samples) for entry in finished] == [(steps, len(handed))]
    assert main(["verify", str(copy)]) == 0
    if options.get("config"):
        assert [path.name for path in copy.glob("global_step_*")] == [f"global_step_{steps}"]


@release(
    "VeRL: two launches",
    "`tests/hosts/verl/test_parts.py::test_its_end_with_another_batch_size`, `tests/hosts/contract/test_loop.py`",
)
def test_more_data_and_epochs(python: str, copy: Path, order: list[int]) -> None:
    assert "10 items were added after" in refusal(python, copy, 2, attempt=2, items=110)
    run(python, copy, 2, attempt=2, items=110, append="next_epoch", epochs=4)
    handed = items(trained(copy))
    assert handed[:200] == order[:200] and len(handed) == 416
    assert sorted(handed[200:310]) == list(range(110)) and len(set(handed[310:])) == 106


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
