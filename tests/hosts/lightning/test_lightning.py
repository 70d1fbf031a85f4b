"""`megaresume.attach` with Lightning's real Trainer, on gloo: killed, and resumed on others.

What a training step was given it writes down itself: `program.py`.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch

from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.program import main
from megaresume.stream.errors import UsageError
from tests.hosts.lightning.program import Module, Texts, run
from tests.hosts.torch.record import items, launch_forked, lines, losses, trained

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]

AFTER_VALIDATION = {"every_n_train_steps": None, "every_n_epochs": 1, "save_on_train_epoch_end": False}
PROGRAM = Path(__file__).with_name("program.py")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three epochs with one rank, which nobody stops."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    run(directory, save_every=13, validate=True)
    return directory


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with two ranks under DDP, killed in the second epoch: rank 0 in the middle of the save of step 24."""
    directory = tmp_path_factory.mktemp("killed") / "run"
    status, said = launch_forked(PROGRAM, directory, 2, batch=2, save_every=8, kill=("save", 24))
    assert status == -signal.SIGKILL, said[-3000:]
    assert (directory / "global_step24").is_dir()
    return directory


def test_packed_texts(tmp_path: Path) -> None:
    def interrupt(trainer: Any) -> None:
        if trainer.global_step == 17:
            raise Interrupted

    layout: Any = {"data": Texts(110), "seq_length": 8, "accumulation": 1, "max_epochs": 3}
    run(tmp_path / "whole", batch=2, **layout)
    order = items(trained(tmp_path / "whole"))
    assert [sorted(order[110 * e : 110 * (e + 1)]) for e in range(3)] == [list(range(110))] * 3
    with pytest.raises(Interrupted):
        run(tmp_path / "run", batch=2, watch=interrupt, **layout)
    run(tmp_path / "run", attempt=2, batch=3, **layout)
    assert items(trained(tmp_path / "run")) == order


def test_from_one_epoch_to_three(tmp_path: Path, order: list[int]) -> None:
    directory, by_epoch = tmp_path / "run", {"every_n_epochs": 1, "every_n_train_steps": None}
    trainer = run(directory, epochs=1, saver=by_epoch)
    assert trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    assert items(trained(directory)) == order[:100]  # 12 steps of 8, and one of 4
    trainer = run(directory, attempt=2, saver=by_epoch, validate=True)
    assert items(trained(directory)) == order
    assert trainer.current_epoch == 3 and trainer.lightning_module.validated == [26, 38]
    assert [e.iteration for e in read_ledger(ledger_path(directory)).entries if e.kind == "checkpoint"] == [13, 26, 38]
    run(directory, attempt=3, saver=by_epoch)  # nothing is left to train
    assert not [line for line in lines(directory) if line["attempt"] == 3]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize(
    ("saver", "first"),
    [({"every_n_train_steps": 13}, 14), ({"every_n_train_steps": 9}, 10), (AFTER_VALIDATION, 14)],
    ids=["at_an_epochs_end", "within_an_epoch", "after_a_validation"],
)
def test_losses_and_counters_are_those_of_a_run_that_nobody_stopped(
    whole: Path, tmp_path: Path, saver: Any, first: int
) -> None:
    def interrupt(trainer: Any) -> None:
        if trainer.global_step == 17:
            raise Interrupted

    directory = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(directory, saver=saver, watch=interrupt, validate=True)
    run(directory, attempt=2, saver=saver, validate=True)
    again = [line for line in lines(directory) if line["attempt"] == 2]
    assert again[0]["step"] == first
    assert losses(directory) == losses(whole)
    unbroken = {(line["step"], line["epoch"], line["batch"]) for line in lines(whole)}
    assert {(line["step"], line["epoch"], line["batch"]) for line in again} <= unbroken


@pytest.mark.parametrize("last", ["link", True])
def test_files_of_the_model_checkpoint_are_links(tmp_path: Path, order: list[int], last: Any) -> None:
    directory, links = tmp_path / "run", tmp_path / "links"
    saver = {"save_top_k": 2, "monitor": "step", "mode": "max", "save_last": last}
    trainer = run(directory, saver=saver, epochs=1, checkpoints={"keep_last": 1})
    assert sorted(path.name for path in links.iterdir()) == ["epoch=0-step=10.ckpt", "epoch=0-step=5.ckpt", "last.ckpt"]
    assert [path.name for path in directory.glob("global_step*")] == ["global_step10"]
    five = Module.load_from_checkpoint(links / "epoch=0-step=5.ckpt", directory=directory)
    state = torch.load(links / "last.ckpt", weights_only=True)["state_dict"]
    assert not torch.equal(five.model.words.weight, state["model.words.weight"])
    assert trainer.checkpoint_callback is not None
    best = trainer.checkpoint_callback.best_model_path
    again = run(directory, attempt=2, saver=saver, ckpt=best)  # a link to what is there
    assert next(line["step"] for line in lines(directory) if line["attempt"] == 2) == 11
    assert again.checkpoint_callback.last_model_path.endswith("last.ckpt")
    assert items(trained(directory)) == order
    with pytest.raises(UsageError, match=r"not a complete checkpoint of the run(.|\n)*keep_last"):
        run(directory, attempt=3, ckpt=links / "epoch=0-step=5.ckpt")


def test_a_checkpoint_by_its_path_and_a_branch_that_was_given_up(tmp_path: Path, order: list[int]) -> None:
    directory = tmp_path / "run"
    run(directory, trainer={"max_steps": 20})
    for attempt, path in enumerate(["global_step5", "global_step5/checkpoint.ckpt"]):
        trainer = run(directory, attempt=2 + attempt, ckpt=directory / path, trainer={"max_steps": 14})
        assert trainer.global_step == 14
        assert items(trained(directory)) == order[:112]
    run(directory, attempt=4, trainer={"max_steps": 20})
    assert next(line["step"] for line in lines(directory) if line["attempt"] == 4) == 11
    assert items(trained(directory)) == order[:160]


def test_the_program_knows_the_run(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(whole)]) == 0
    assert main(["latest", str(whole)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(whole / "global_step26")


def test_with_workers(copy: Path, order: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    trainer = run(copy, attempt=2, save_every=50, batch=2, accumulation=4, num_workers=2, persistent_workers=True)
    said = capfd.readouterr().out
    assert "gbs 8->8 | repeated 0 skipped 0 | step 16 from global_step16 | random state reseeded" in said
    assert items(trained(copy)) == order
    assert (trainer.current_epoch, trainer.global_step) == (3, 38)
