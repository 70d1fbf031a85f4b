"""The parts of the host of TRL's asynchronous GRPO, without its processes."""

from __future__ import annotations

import queue
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

from transformers import Trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample, _AsyncRolloutLoop

import megaresume
from megaresume import Prompts
from megaresume.checkpoint.records.prompt_ledger import STATE
from megaresume.hosts.trl import Arrivals, GroupMember, Issuer, Sample, _read, _train, newest_whole
from megaresume.runs.prompts import prove
from megaresume.stream.errors import StateError
from tests.hosts.hugging_face.program import make
from tests.hosts.hugging_face.test_weights import mixtral
from tests.hosts.prompts.simulated import Texts


def sample(prompt: Any, rollout: int, *, rows: int = 1, version: int = 0) -> Sample:
    """A row of a rollout, as the worker sends it."""
    empty: Any = np.zeros(1)
    of_trl: dict[str, Any] = {field.name: empty for field in fields(RolloutSample)}
    of_trl |= {"model_version": version, "group_id": 7}
    return Sample(**of_trl, ordinal=prompt.ordinal, ticket=prompt.ticket, rollout=rollout, rows=rows)


def arrivals(prompts: Prompts, *, requeues: bool = True, version: int = 0) -> Arrivals:
    """Of a trainer whose weights have this version."""
    trainer = SimpleNamespace(rollout_queue=queue.Queue(), model_version=version)
    trainer.args, trainer._metrics = SimpleNamespace(max_staleness=2), {"train": {"sample/dropped_stale_total": []}}
    return Arrivals(trainer, prompts, requeues=requeues)


def test_a_worker_is_given_prompts_in_order() -> None:
    prompts = Prompts(Texts("data", 20), rollouts=2)
    dataset = Issuer(prompts).dataset
    rows = iter(dataset)
    found = [next(rows) for _ in range(3)]
    expected = Prompts(Texts("data", 20)).issue(3)
    assert [(ordinal, ticket[:16], content) for ordinal, ticket, content in found] == [
        (prompt.ordinal, prompt.ticket[:16], prompt.content) for prompt in expected
    ]
    dataset.lost(1, found[1][1], [0, 1])
    assert prompts.in_flight == [0, 2]
    assert prompts.counts == {"dropped: empty": 2}


def test_what_leaves_the_queue_is_wanted() -> None:
    prompts = Prompts(Texts("data", 20), rollouts=2)
    first, second = prompts.issue(2)
    arriving = arrivals(prompts)
    for one in (sample(first, 0, rows=2), sample(first, 0, rows=2), sample(first, 0), sample(second, 1)):
        arriving._queue.put(one)
    got = [arriving.get(timeout=1) for _ in range(3)]
    assert [(one.group_id, one.group_id.rollout) for one in got] == [(0, 0), (0, 0), (1, 1)]
    assert all(isinstance(one.group_id, GroupMember) for one in got)
    with pytest.raises(queue.Empty):
        arriving.get(timeout=0.01)
    assert prompts.counts == {"repeated": 1}


@pytest.mark.parametrize("requeues", [True, False])
def test_stale_rollouts(requeues: bool) -> None:
    prompts = Prompts(Texts("data", 20))
    (first,) = prompts.issue(1)
    arriving = arrivals(prompts, requeues=requeues, version=3)
    arriving._queue.put(sample(first, 0))
    with pytest.raises(queue.Empty):
        arriving.get(timeout=0.01)
    assert [prompt.ordinal for prompt in prompts.issue(1)] == ([0] if requeues else [1])
    assert prompts.counts == {("requeued: stale" if requeues else "dropped: stale"): 1}


def test_how_old_what_is_trained_is(tmp_path: Path) -> None:
    prompts = Prompts(Texts("data", 20), ledger=tmp_path / "prompts.jsonl")
    issued = prompts.issue(3)
    arriving = arrivals(prompts, version=2)
    for prompt, version in zip(issued, (0, 2, 2), strict=True):
        arriving._queue.put(sample(prompt, 0, version=version))
        arriving.get(timeout=1)
    prompts.trained(1, [0, 1, 2])
    prompts.state_dict()
    assert prove(tmp_path).staleness == {0: 2, 2: 1}


def test_a_checkpoint_without_its_prompts(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text('{"global_step": 4}')
    with pytest.raises(StateError, match="no state of its prompts"):
        _read(tmp_path)
    (tmp_path / STATE).write_text('{"step": 3, "prompts": {}}')
    with pytest.raises(StateError, match="from different steps"):
        _read(tmp_path)
    (tmp_path / STATE).write_text('{"step": 3, "pro')
    with pytest.raises(StateError, match="cannot be read"):
        _read(tmp_path)


def test_a_save_that_was_killed_is_passed_over(tmp_path: Path) -> None:
    assert newest_whole(tmp_path) is None
    for step in (3, 6, 9, 12):
        path = tmp_path / f"checkpoint-{step}"
        path.mkdir()
        (path / STATE).write_text(f'{{"step": {step}, "prompts": {{}}}}')
        (path / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    (tmp_path / "checkpoint-12" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-9" / "trainer_state.json").write_text('{"global_st')
    assert newest_whole(tmp_path) == str(tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-6" / STATE).unlink()  # saved without megaresume
    with pytest.raises(StateError, match="no state of its prompts"):
        newest_whole(tmp_path)


def test_a_run_begins_again_only_if_it_has_no_checkpoint(tmp_path: Path) -> None:
    def made() -> Prompts:
        return Prompts(Texts("data", 20), ledger=tmp_path / "prompts.jsonl")

    trainer = SimpleNamespace(args=SimpleNamespace(output_dir=str(tmp_path)))
    prompts = made()
    (first,) = prompts.issue(1)
    assert prompts.done(0, first.ticket)
    prompts.trained(1, [0])
    prompts.state_dict()
    (tmp_path / "checkpoint-1").mkdir()  # and killed while it saved
    again = made()
    _train(trainer, again, lambda: None)
    assert [prompt.ordinal for prompt in again.issue(1)] == [0]
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text('{"global_step": 1}')
    with pytest.raises(StateError, match="no state was loaded"):
        _train(trainer, made(), lambda: None)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("AsyncGRPOTrainer", (), {"__module__": "trl.experimental.async_grpo"})
    trainer: Any = kind()
    with pytest.raises(megaresume.MegaresumeError, match="not an asynchronous GRPO trainer"):
        megaresume.attach(trainer)
    for name in ("rollout_queue", "_trained_groups", "_save_checkpoint", "_inner_training_loop", "train"):
        setattr(trainer, name, None)
    trainer._load_from_checkpoint = trainer._issue_warnings_after_load = None
    trainer._load_callback_state = trainer._run_epoch = None
    trainer.accelerator, trainer.train_dataset = SimpleNamespace(is_main_process=True), None
    trainer.rollout_worker = object()
    trainer.args = SimpleNamespace(num_generations=2, output_dir="run", seed=1, data_seed=None, world_size=1)
    with monkeypatch.context() as launched, pytest.raises(megaresume.MegaresumeError, match="dataset by itself"):
        launched.setenv("WORLD_SIZE", "2")
        megaresume.attach(trainer)
    with pytest.raises(megaresume.MegaresumeError, match="a rollout worker of your own"):
        megaresume.attach(trainer)
    trainer.rollout_worker, trainer.train_dataset = SimpleNamespace(_loop_cls=_AsyncRolloutLoop), ["p0", "p1"]
    with pytest.raises(megaresume.MegaresumeError, match=r"bad on_stale(.|\n)*'keep'"):
        megaresume.attach(trainer, on_stale="keep")


def test_weights_that_have_other_names_in_a_checkpoint_are_loaded(tmp_path: Path) -> None:
    """As tests/hosts/hugging_face/test_weights.py says, on every rank."""
    trainer: Any = make(tmp_path / "run")
    trainer.__class__ = type("AsyncGRPOTrainer", (Trainer,), {"__module__": "trl.experimental.async_grpo"})
    trainer.rollout_worker = trainer.rollout_queue = trainer._trained_groups = None
    trainer.accelerator, trainer.model = SimpleNamespace(is_main_process=False), mixtral()
    trainer.model.save_pretrained(tmp_path / "checkpoint-1")
    megaresume.attach(trainer)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    for parameter in trainer.model.parameters():
        parameter.data.zero_()
    trainer._load_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())
