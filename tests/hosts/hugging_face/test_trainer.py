"""Hugging Face's Trainer: killed with two ranks in the middle of a save, and resumed in many ways.

What `HostContract` does not look at. One run is killed; a test goes on from a copy of it, with one rank. What was
trained is put together from the lines that the training steps wrote: `trained`.
"""

from __future__ import annotations

import json
import logging
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from transformers import EarlyStoppingCallback

import megaresume
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.program import main
from megaresume.stream.errors import StateError, UsageError
from tests.hosts.hugging_face.program import ITEMS, Numbers, Recorder, make
from tests.hosts.torch.record import items, launch_forked, lines, losses, trained

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("program.py")


def run(output: Path, *, attach: Any = None, resume: Any = True, **options: Any) -> Recorder:
    """Train in this process, with one rank, to the end."""
    trainer = make(output, **options)
    megaresume.attach(trainer, **attach or {})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three epochs with one rank, which nobody stops."""
    output = tmp_path_factory.mktemp("whole") / "run"
    run(output, per_device_train_batch_size=4)
    return output


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with two ranks, killed in the second epoch: rank 0 in the middle of the save of step 20."""
    output = tmp_path_factory.mktemp("killed") / "run"
    status, text = launch_forked(PROGRAM, output, 2, kill=("save", 20))
    assert status == -signal.SIGKILL, text[-3000:]
    assert (output / "checkpoint-20").is_dir()
    return output


def test_two_ranks_to_one(
    copy: Path,
    order: list[int],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    left = copy / "checkpoint-20" / "rng_state_1.pth"  # of the second rank, by the save that was killed
    left.touch()
    options: dict[str, Any] = {"dataloader_num_workers": 2, "ignore_data_skip": True}
    options |= {"per_device_train_batch_size": 2, "restore_callback_states_from_checkpoint": True}
    trainer = run(copy, attempt=2, **options)
    assert not left.exists() and left.with_name("trainer_state.json").exists()
    said = capfd.readouterr().out
    assert f"resumed at sample 120 | digest {digest_of(copy, 15)} | dp 2->1" in said
    assert "gbs 8->4 | repeated 0 skipped 0 | step 15 from checkpoint-15" in said
    assert "included callbacks not included" not in caplog.text
    assert items(trained(copy)) == order
    epochs = {log["step"]: log["epoch"] for log in trainer.state.log_history if "loss" in log}
    assert epochs[16] == pytest.approx((120 + 4) / ITEMS) and trainer.state.epoch == 3


@pytest.mark.parametrize(("number", "micro", "left"), [(45, 2, 0), (47, 1, 1)])
def test_a_last_step_that_is_short_on_two_ranks(tmp_path: Path, number: int, micro: int, left: int) -> None:
    """Steps of 8 and of 4: the last one has 5 items, in micro-batches of 3 and 2; or 3, of which one is left over."""
    output = tmp_path / "run"
    options = {"per_device_train_batch_size": micro, "num_train_epochs": 1, "save_steps": 100}
    status, said = launch_forked(PROGRAM, output, 2, items=number, **options)
    assert status == 0
    assert said.count("the last 1 of the run's items will not be trained: its last step has 3, which") == left
    handed = items(trained(output))
    assert len(handed) == len(set(handed)) == number - left
    run(output, data=Numbers(number), **options)
    assert sorted(items(trained(output))) == list(range(number)) and items(trained(output))[: number - left] == handed


def digest_of(output: Path, step: int) -> str:
    return json.loads((output / "megaresume" / f"step_{step:07d}.manifest.json").read_text())["digest"]


def test_other_data_is_refused(copy: Path) -> None:
    with pytest.raises(StateError, match="contents"):
        run(copy, attempt=2, data=Numbers(first=1))


def test_from_one_epoch_to_three(tmp_path: Path, order: list[int]) -> None:
    output = tmp_path / "run"
    options = {"per_device_train_batch_size": 4, "save_strategy": "epoch"}
    trainer = run(output, num_train_epochs=1, **options)
    assert items(trained(output)) == order[:100]  # 12 steps of 8, and one of 4
    assert trainer.state.global_step == 13
    run(output, attempt=2, **options)
    assert items(trained(output)) == order
    assert [e.iteration for e in read_ledger(ledger_path(output)).entries if e.kind == "checkpoint"] == [13, 26, 38]


def test_the_program_knows_the_run(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(whole), "--steps", "14:16", "--json"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [s["segments"][0]["document"] for s in said] == items(trained(whole)[13:15])
    assert main(["verify", str(whole)]) == 0
    assert main(["latest", str(whole)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(whole / "checkpoint-38")


def test_the_losses_are_those_of_a_run_that_nobody_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # The first epoch ends with step 13, which is saved and then evaluated.
    options = {"per_device_train_batch_size": 4, "save_steps": 13, "eval_strategy": "epoch"}
    run(tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", kill=("interrupt", 17), **options)
    run(tmp_path / "cut", attempt=2, **options)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    said = capfd.readouterr().out
    assert "step 13 from checkpoint-13" in said and "random numbers were drawn" not in said


@pytest.mark.parametrize("by_the_trainer", [False, True])
def test_the_patience_of_early_stopping_goes_on(tmp_path: Path, by_the_trainer: bool) -> None:
    def stopping(attempt: int, kill: Any) -> Recorder:
        trainer = make(
            tmp_path / "run",
            attempt=attempt,
            kill=kill,
            save_steps=2,
            eval_steps=2,
            eval_strategy="steps",
            metric_for_best_model="loss",
            restore_callback_states_from_checkpoint=by_the_trainer,
        )
        # after the first evaluation none is better by so much
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=3, early_stopping_threshold=1e9))
        megaresume.attach(trainer)
        return trainer

    with pytest.raises(KeyboardInterrupt):
        stopping(1, ("interrupt", 7)).train()
    trainer = stopping(2, ("", 0))
    trainer.train(resume_from_checkpoint=True)
    assert [line["step"] for line in lines(tmp_path / "run") if line["attempt"] == 2] == [7, 7, 8, 8]
    assert trainer.state.global_step == 8


def test_max_steps_and_a_checkpoint_by_its_path(tmp_path: Path, order: list[int]) -> None:
    output = tmp_path / "run"
    options = {"per_device_train_batch_size": 4, "max_steps": 20}
    run(output, **options)
    assert items(trained(output)) == order[:160]
    with pytest.raises(UsageError, match="directory of checkpoints, not a checkpoint"):
        run(output, attempt=2, resume=str(output), **options)
    trainer = run(output, attempt=2, resume=str(output / "checkpoint-5"), **options | {"max_steps": 14})
    assert trainer.state.global_step == 14
    assert items(trained(output)) == order[:112]
    # checkpoint-15 and 20 are of a branch that was given up
    run(output, attempt=3, **options)
    assert next(line["step"] for line in lines(output) if line["attempt"] == 3) == 15
    assert items(trained(output)) == order[:160]
    run(output, attempt=4, **options)  # nothing is left to train
    assert not [line for line in lines(output) if line["attempt"] == 4]


def test_save_total_limit_keeps_the_newest_complete_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "run"
    limits: list[Any] = []  # the Trainer deletes before the newer one is complete: it must be told of none
    monkeypatch.setattr(
        "transformers.trainer.rotate_checkpoints", lambda **more: limits.append(more["save_total_limit"])
    )
    trainer = run(output, num_train_epochs=1, save_total_limit=2, per_device_train_batch_size=4, save_steps=3)
    assert trainer.args.save_total_limit == 2
    assert limits == [None] * 5
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-13"]


def test_a_checkpoint_without_its_data_is_refused(copy: Path) -> None:
    shutil.rmtree(copy / "megaresume")
    state = copy / "checkpoint-15" / "trainer_state.json"
    plain = json.loads(state.read_text())
    plain["stateful_callbacks"].pop("megaresume")
    state.write_text(json.dumps(plain))
    shutil.rmtree(copy / "checkpoint-20")
    (copy / "latest").unlink()
    with pytest.raises(StateError, match="the checkpoint has no data state"):
        run(copy)


class OwnSampler(Recorder):
    def _get_train_sampler(self, *args: Any, **more: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Lines(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"optim": "galore_adamw_layerwise"}, r"optim cannot(.|\n)*optim: galore_adamw_layerwise"),
        ({"optim": "adalomo"}, r"optim cannot(.|\n)*optim: adalomo"),
        (
            {"save_total_limit": 1, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 5},
            "load_best_model_at_end",
        ),
        ({"data": Lines(), "max_steps": 5}, "train_dataset has no items by number"),
    ],
)
def test_refused(tmp_path: Path, options: Any, words: str) -> None:
    trainer = make(tmp_path / "run", **options)
    with pytest.raises(UsageError, match=words):
        megaresume.attach(trainer)


def test_a_stream_is_refused_in_the_words_of_the_trainer(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"x": 1}\n')
    streaming = datasets.load_dataset("json", data_files=str(rows), streaming=True, split="train")
    trainer = make(tmp_path / "run")
    given = {
        "data= has": Lines(),
        "data= is a path": "data.yaml",
        "dataset 'web' has": {"web": (streaming, 1)},
        "pass its dataset": torch.utils.data.DataLoader(trainer.train_dataset),
    }
    for words, data in given.items():
        with pytest.raises(UsageError, match=words) as refused:
            megaresume.attach(trainer, data)
        assert not any(other in str(refused.value) for other in ("DeepSpeed", "DataLoader(", "open_stream"))


def test_fsdp1_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run")
    trainer.is_fsdp_enabled = True
    trainer.accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=1)
    with pytest.raises(UsageError, match=r"FSDP1 cannot be used with megaresume\.attach"):
        megaresume.attach(trainer)


def test_a_sampler_of_its_own_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run")
    trainer.__class__ = OwnSampler
    with pytest.raises(UsageError, match="its own sampler"):
        megaresume.attach(trainer)


def test_a_trainer_without_a_method_that_is_needed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path / "run")
    monkeypatch.delattr("transformers.Trainer._run_epoch")
    with pytest.raises(UsageError, match=r"another Trainer(.|\n)*without _run_epoch"):
        megaresume.attach(trainer)


def test_attached_once_and_trained_once(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", max_steps=2)
    megaresume.attach(trainer)
    with pytest.raises(UsageError, match="already"):
        megaresume.attach(trainer)
    trainer.train()
    with pytest.raises(UsageError, match="one training"):
        trainer.train()
