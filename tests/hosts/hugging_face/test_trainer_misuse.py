"""What people do to a Trainer between `megaresume.attach` and the end: it is exact all the same, or refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.release import release

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import TrainerCallback

import megaresume
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.checkpoint.roots import Roots
from megaresume.program import main
from megaresume.stream.errors import CheckpointError, StateError, UsageError
from tests.hosts.hugging_face.program import Numbers, Recorder, make
from tests.hosts.torch.record import items, launch_forked, lines, trained

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("program.py")


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The items of one epoch."""
    output = tmp_path_factory.mktemp("whole") / "run"
    trainer = make(output, num_train_epochs=1)
    megaresume.attach(trainer)
    trainer.train()
    return items(trained(output))


def test_files_of_every_node_on_disks_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their trainer_state.json differ, so that the parts of the nodes would not fit together."""
    trainer = make(tmp_path / "run", save_on_each_node=True)
    megaresume.attach(trainer)
    parts = SimpleNamespace(nodes=SimpleNamespace(number=2))
    monkeypatch.setattr(Roots, "parts_of", lambda *_: parts)
    with pytest.raises(UsageError, match="save_on_each_node, and every node has a disk of its own"):
        trainer.train()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("per_device_train_batch_size", 4),
        ("gradient_accumulation_steps", 1),
        ("dataloader_num_workers", 1),
        ("seed", 7),
        ("output_dir", "elsewhere"),
    ],
)
def test_a_setting_changed_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = make(tmp_path / "run")
    megaresume.attach(trainer)
    setattr(trainer.args, name, value)
    with pytest.raises(UsageError, match=f"{name} was changed after megaresume.attach"):
        trainer.train()


def test_a_dataset_changed_afterwards(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run")
    megaresume.attach(trainer)
    trainer.train_dataset = Numbers(50)
    with pytest.raises(UsageError, match=r"train_dataset was changed after megaresume\.attach"):
        trainer.train()


def test_a_dataset_changed_by_the_class_as_it_trains(tmp_path: Path) -> None:
    class Filters(Recorder):
        def train(self, *args: Any, **more: Any) -> Any:
            self.train_dataset = Numbers(50)
            return super().train(*args, **more)

    trainer = make(tmp_path / "run")
    trainer.__class__ = Filters
    megaresume.attach(trainer)
    with pytest.raises(UsageError, match=r"train_dataset was changed after megaresume\.attach"):
        trainer.train()


def test_a_batch_that_was_looked_at(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run")
    megaresume.attach(trainer)
    assert len(trainer.get_train_dataloader()) == 50  # which takes none
    next(iter(trainer.get_train_dataloader()))
    with pytest.raises(StateError, match=r"something else read(.|\n)*sample 2; the steps of the run at sample 0"):
        trainer.train()


def test_a_batch_that_is_trained_in_place_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path / "run")
    megaresume.attach(trainer)
    taken = trainer.get_batch_samples

    def first_alone(*args: Any) -> Any:
        batches, count = taken(*args)
        return ([batches[0]] * len(batches) if trainer.state.global_step == 2 else batches), count

    monkeypatch.setattr(trainer, "get_batch_samples", first_alone)
    with pytest.raises(
        StateError, match=r"trained twice in one step(.|\n)*samples 8 to 9, samples 10 to 11 taken since"
    ):
        trainer.train()
    assert trainer.state.global_step == 2


class Peek(TrainerCallback):
    def __init__(self, when: str) -> None:
        setattr(self, when, self.peek)

    def peek(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **more: Any) -> None:
        if state.global_step >= 2:
            next(iter(train_dataloader))


@pytest.mark.parametrize("when", ["on_step_begin", "on_step_end", "on_epoch_end"])
def test_a_callback_that_takes_a_batch(tmp_path: Path, when: str) -> None:
    trainer = make(tmp_path / "run", num_train_epochs=2)
    trainer.add_callback(Peek(when))
    megaresume.attach(trainer)
    with pytest.raises(StateError, match=r"was moved while it was being read|taken and not trained"):
        trainer.train()


class Evaluate(TrainerCallback):
    trainer: Any

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step % 4 == 2:
            self.trainer.evaluate()


@release(
    "two more trainings",
    "`tests/hosts/hugging_face/test_trainer.py::test_the_losses_are_those_of_a_run_that_nobody_stopped`",
)
def test_a_callback_that_evaluates(tmp_path: Path, order: list[int]) -> None:
    trainer = make(tmp_path / "run", num_train_epochs=1)
    evaluate = Evaluate()
    evaluate.trainer = trainer
    trainer.add_callback(evaluate)
    megaresume.attach(trainer)
    trainer.train()
    assert items(trained(tmp_path / "run")) == order


def test_callbacks_that_were_removed_or_changed_the_state(tmp_path: Path) -> None:
    trainer = make(tmp_path / "removed")
    megaresume.attach(trainer)
    del trainer.callback_handler.callbacks[0]
    with pytest.raises(StateError, match=r"taken and not trained(.|\n)*the first of the callbacks was removed"):
        trainer.train()

    class Jump(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            state.global_step += state.global_step == 3

    trainer = make(tmp_path / "changed")
    trainer.add_callback(Jump())
    megaresume.attach(trainer)
    with pytest.raises(StateError, match="count different steps"):
        trainer.train()


def test_an_epoch_that_a_callback_ends_early_is_refused(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_epoch_stop = state.global_step == 2

    trainer = make(tmp_path / "run", num_train_epochs=2)
    trainer.add_callback(Stop())
    megaresume.attach(trainer)
    words = r"should_epoch_stop cannot be used(.|\n)*sample 8, in epoch 0(.|\n)*should_training_stop"
    with pytest.raises(UsageError, match=words):
        trainer.train()


@pytest.mark.cold
def test_two_processes_that_know_nothing_of_each_other(tmp_path: Path) -> None:
    """Accelerate makes their process group, and tells the Trainer of one process, as no GPU is visible."""
    status, text = launch_forked(PROGRAM, tmp_path / "run", 2, use_cpu=False)
    assert status == 1 and "each process would train the whole dataset by itself" in text, text[-3000:]
    assert "2 processes in torch.distributed, TrainingArguments.world_size 1" in text and "use_cpu=True" in text
    assert not lines(tmp_path / "run") and "Traceback" not in text


def test_processes_of_a_launcher_without_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path / "run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"2 processes by WORLD_SIZE, TrainingArguments\.world_size 1"):
        megaresume.attach(trainer)


def test_checkpoints_of_others(tmp_path: Path, order: list[int]) -> None:
    first = tmp_path / "first"
    trainer = make(first, max_steps=10)
    megaresume.attach(trainer)
    trainer.train()

    def resumed(path: Path, **options: Any) -> Any:
        trainer = make(tmp_path / "second", num_train_epochs=1, **options)
        megaresume.attach(trainer)
        return trainer.train(resume_from_checkpoint=str(path))

    with pytest.raises(CheckpointError, match="checkpoint-7"):
        resumed(first / "checkpoint-7")
    copied = tmp_path / "copied" / "checkpoint-5"
    shutil.copytree(first / "checkpoint-5", copied)
    (copied / "optimizer.pt").unlink()
    with pytest.raises((CheckpointError, StateError), match="checkpoint-5"):
        resumed(copied)
    model = tmp_path / "model"
    shutil.copytree(first / "checkpoint-5", model)
    (model / "trainer_state.json").unlink()
    with pytest.raises(StateError, match="this is not a checkpoint of the Trainer's"):
        resumed(model)
    with pytest.raises(StateError, match="contents"):
        resumed(first / "checkpoint-5", data=Numbers(first=1))
    resumed(first / "checkpoint-5")  # into another directory: the data goes on there
    assert items([line["items"] for line in lines(tmp_path / "second")]) == order[20:]


def test_a_start_in_which_attach_was_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it has saved is not taken, as it has no data state, and not given up without a word."""
    root = tmp_path / "run"
    for number, (steps, attached) in enumerate([(5, True), (12, False), (15, True)]):
        trainer = make(root, attempt=1 + number, max_steps=steps)
        if attached:
            megaresume.attach(trainer)
        if number == 2:
            assert main(["latest", str(root), "--tag"]) == 0 and main(["doctor", str(root), "--json"]) == 0
            said = capsys.readouterr()
            assert "\ncheckpoint-5\n" in said.out and "saves of the same steps replace it" in said.err
            assert said.out.count("to keep it, move it elsewhere: a save of the same step replaces it") == 2
        trainer.train(resume_from_checkpoint=number > 0)
    for lost in ("checkpoint-12", "checkpoint-10"):
        assert f"passed over {lost}: it was written without megaresume" in caplog.text
    assert "(checkpoint-12, checkpoint-10), and saves of the same steps replace it" in caplog.text


def test_a_checkpoint_without_an_optimizer(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", max_steps=5, save_only_model=True)
    with pytest.raises(UsageError, match=r"save_only_model cannot be used with megaresume\.attach"):
        megaresume.attach(trainer)
    trainer = make(tmp_path / "run", max_steps=5)
    megaresume.attach(trainer)
    trainer.train()
    (tmp_path / "run" / "checkpoint-5" / "optimizer.pt").unlink()
    shutil.rmtree(tmp_path / "run" / "megaresume")  # or the file that is gone would be missed
    trainer = make(tmp_path / "run", max_steps=10)
    megaresume.attach(trainer)
    with pytest.raises(CheckpointError, match="the checkpoint has no optimizer"):
        trainer.train(resume_from_checkpoint=True)


def test_a_run_that_saves_nothing_beside_checkpoints_of_another(tmp_path: Path, order: list[int]) -> None:
    for strategy in ("steps", "no"):
        trainer = make(tmp_path / "run", attempt=1 + (strategy == "no"), max_steps=6, save_strategy=strategy)
        megaresume.attach(trainer)
        trainer.train(resume_from_checkpoint=False)
    assert items([line["items"] for line in lines(tmp_path / "run") if line["attempt"] == 2]) == order[:24]
    assert not [entry for entry in read_ledger(ledger_path(tmp_path / "run")).entries[3:] if entry.kind == "start"]
    saver = make(tmp_path / "run", save_strategy="no")
    saver.add_callback(SaveAt(2))
    megaresume.attach(saver)
    with pytest.raises(UsageError, match="would save over those"):
        saver.train()


class SaveAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_save = state.global_step == self.step


def test_the_working_directory_was_changed(tmp_path: Path, order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    class Leave(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 7:
                monkeypatch.chdir(tmp_path / "elsewhere")

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trainer = make(Path("run"), num_train_epochs=1)
    trainer.record = tmp_path / "run.record"
    megaresume.attach(trainer)
    trainer.add_callback(Leave())
    trainer.train()
    assert [path.name for path in sorted(tmp_path.glob("run/checkpoint-*"))][:2] == ["checkpoint-10", "checkpoint-15"]
    assert not list((tmp_path / "elsewhere").rglob("*"))


class Interrupting(TrainerCallback):
    """Raises KeyboardInterrupt in one of its methods, in step 8."""

    def __init__(self, where: str) -> None:
        setattr(self, where, self._interrupt)

    def _interrupt(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 7:
            raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["on_optimizer_step", "on_pre_optimizer_step"])
def test_saved_by_hand_after_an_interrupt_that_left_the_weights_ahead(
    tmp_path: Path, order: list[int], where: str
) -> None:
    """The weights have made step 8, perhaps, and neither the Trainer nor the data has counted it."""
    trainer: Any = make(tmp_path / "run", num_train_epochs=1)
    trainer.add_callback(Interrupting(where))
    megaresume.attach(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    for _ in range(2):
        with pytest.raises(StateError, match="a checkpoint was asked for in the middle of a step"):
            trainer._save_checkpoint(trainer.model, None)
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-5"]
    trainer = make(tmp_path / "run", num_train_epochs=1, attempt=2)
    megaresume.attach(trainer)
    trainer.train(resume_from_checkpoint=True)
    assert items(trained(tmp_path / "run")) == order


def test_saved_by_hand_after_an_interrupt_within_a_micro_batch(tmp_path: Path, order: list[int]) -> None:
    """The weights are those of step 7."""
    trainer: Any = make(tmp_path / "run", num_train_epochs=1, kill=("interrupt", 8))
    megaresume.attach(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer._save_checkpoint(trainer.model, None)
    trainer = make(tmp_path / "run", num_train_epochs=1, attempt=2)
    megaresume.attach(trainer)
    trainer.train(resume_from_checkpoint=True)
    assert next(line["step"] for line in lines(tmp_path / "run") if line["attempt"] == 2) == 8
    assert items(trained(tmp_path / "run")) == order
