"""What of `megaresume.attach` for VeRL's reinforcement learning needs no VeRL: what is handed out, what becomes of
groups, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaresume.checkpoint.records.prompt_ledger import STATE
from megaresume.hosts.verl_issued import IssuedPrompts, parsed_uid, uid_of
from megaresume.hosts.verl_prompts import attach
from megaresume.runs.prompts import prove
from megaresume.stream.errors import StateError, UsageError


class Part(SimpleNamespace):
    """Of VeRL's config."""

    get = SimpleNamespace.__getattribute__


class Driver:
    """As much of a trainer of reinforcement learning as is looked at; ten prompts, three epochs."""

    def __init__(self, directory: Path, batch_size: int, found: Any = None, step: int = 0, **data: Any) -> None:
        trainer = Part(total_epochs=3, total_training_steps=None, default_local_dir=str(directory))
        rollout = Part(rollout=Part(n=2))
        data = {"shuffle": True, "seed": None, "train_batch_size": batch_size} | data
        self.config = Part(data=Part(**data), trainer=trainer, actor_rollout_ref=rollout)
        self.train_dataset: Any = torch.arange(10)
        self.train_dataloader: Any = torch.utils.data.DataLoader(self.train_dataset, batch_size)
        self.global_steps, self.steps_per_epoch, self.total_training_steps = 0, 10 // batch_size, 0
        self._found, self._step = found, step

    def _load_checkpoint(self) -> None:
        self.global_steps = self._step
        if self._found is not None and self._step % len(self.train_dataloader):
            self.train_dataloader.load_state_dict(self._found)

    def _save_checkpoint(self) -> None:
        """Looked for."""

    def hand_out(self, most: int = 100) -> list[int]:
        """The prompts of the next steps, to the end of the run; the last one is saved."""
        self._load_checkpoint()
        self.global_steps += 1
        handed: list[int] = []
        for batch in self.train_dataloader:
            handed += batch.tolist()
            if self.global_steps in (most, self.total_training_steps):
                self._found = self.train_dataloader.state_dict()
                break
            self.global_steps += 1
        return handed


@pytest.mark.parametrize(("batch_size", "step"), [(2, 5), (3, 5), (5, 5), (10, 4)])
def test_prompts_resume(batch_size: int, step: int, tmp_path: Path) -> None:
    whole = Driver(tmp_path / "whole", 2, seed=3)
    attach(whole)
    order = whole.hand_out()
    assert sorted(order[:10]) == sorted(order[10:20]) == sorted(order[20:]) == list(range(10))
    assert order[:10] != order[10:20]
    first = Driver(tmp_path, 2, seed=3)
    attach(first)
    before = first.hand_out(step)
    # Step 5 is the end of an epoch of steps of 2; step 4 is one of this run to VeRL, with a step more than it has.
    second = Driver(tmp_path, batch_size, first._found, step, seed=3)
    attach(second)
    after = second.hand_out()
    left = (30 - 2 * step) // batch_size
    assert before + after == order[: 2 * step + left * batch_size]
    assert second.total_training_steps == step + left < second.steps_per_epoch
    proof = prove(tmp_path)
    assert proof.holds and (proof.trained, proof.in_flight) == (len(before + after), 0)
    assert proof.steps == dict.fromkeys(range(1, step + 1), 2) | dict.fromkeys(
        range(step + 1, step + 1 + left), batch_size
    )


def test_a_run_that_was_killed_in_its_first_save(tmp_path: Path) -> None:
    killed = Driver(tmp_path, 2)
    attach(killed)
    order = killed.hand_out(4)
    again = Driver(tmp_path, 2)
    attach(again)
    assert again.hand_out(4) == order
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    ignored = Driver(tmp_path, 2)  # trainer.resume_mode=disable
    attach(ignored)
    with pytest.raises(StateError, match="no state was loaded"):
        ignored.hand_out(4)


def test_prompts_that_are_refused(tmp_path: Path) -> None:
    driver = Driver(tmp_path, 2, seed=None)
    attach(driver)
    driver.hand_out(4)
    state = driver._found
    for found, step, words in (
        (None, 4, "no data.pt in global_step_4"),
        ({"_num_yielded": 4}, 4, "written without megaresume"),
        (state, 6, r"from different steps(.|\n)*data.pt of step 4"),
    ):
        other = Driver(tmp_path, 2, found, step, seed=None)
        attach(other)
        with pytest.raises(StateError, match=words):
            other.hand_out()
    other = Driver(tmp_path, 2, state, 4, seed=1)
    attach(other)
    with pytest.raises(StateError, match="seed"):
        other.hand_out()
    with pytest.raises(UsageError, match="is attached already"):
        attach(other)
    with pytest.raises(UsageError, match="not a reinforcement-learning trainer of VeRL's"):
        attach(SimpleNamespace())
    other = Driver(tmp_path, 2, seed=1)
    with pytest.raises(UsageError, match=r"bad on_stale(.|\n)*'keep'"):
        attach(other, on_stale="keep")  # type: ignore[arg-type]
    other.train_dataset = SimpleNamespace(on_batch_end=None)
    with pytest.raises(UsageError, match="prompts that change"):
        attach(other)
    ahead = type("OneStepOffRayTrainer", (Driver,), {"fit": None})(tmp_path, 2)
    with pytest.raises(UsageError, match=r"its own loop(.|\n)*OneStepOffRayTrainer.fit"):
        attach(ahead)
    sampled: Any = Driver(tmp_path, 2, seed=1)
    sampled._fetch_one_gen_batch, sampled.replay_buffer = None, SimpleNamespace(_clear_groups=None)
    with pytest.raises(UsageError, match=r"a sampler of your own(.|\n)*without _evict_terminal_groups"):
        attach(sampled)


class Buffer:
    """As much of VeRL's replay buffer as is hooked; groups by their uid."""

    def __init__(self) -> None:
        self.cleared: list[str] = []

    def _evict_terminal_groups(self, step: int, partition: str, reasons: Any) -> None:
        if uids := set().union(*reasons[:3]):
            self._clear_groups(partition, uids)

    def _clear_groups(self, partition: str, uids: Any) -> None:
        self.cleared += uids

    def _materialize_batch(self, partition: str, uids: list[str], keys: list[str]) -> Any:
        return SimpleNamespace(keys=keys)


@pytest.mark.parametrize("on_stale", ["requeue", "drop"])
def test_what_becomes_of_a_group(on_stale: Any, tmp_path: Path) -> None:
    driver: Any = Driver(tmp_path, 2)
    driver.replay_buffer = buffer = Buffer()
    driver._fetch_one_gen_batch = driver._reissue_inflight_prompts = None
    driver._step_once = lambda batch: batch
    attach(driver, on_stale=on_stale)
    prompts = driver._megaresume
    issued = prompts.issue(8)
    uids = [uid_of(prompt) for prompt in issued]
    assert [parsed_uid(uid) for uid in uids] == [(prompt.ordinal, prompt.ticket) for prompt in issued]
    assert not any("_" in uid for uid in uids) and parsed_uid("1b4e28ba-2fa1-11d2-883f-0016d3cca427")[0] == -1
    driver.global_steps = 1
    keys = [f"{uids[0]}_0_0", f"{uids[0]}_1_0", f"{uids[0]}_1_1", f"{uids[1]}_1_0", "padding_0_0"]
    tags: list[dict[str, Any]] = [{"min_global_steps": 0} for _ in keys[:4]] + [{"is_padding": True}]
    driver._step_once(SimpleNamespace(keys=keys, tags=tags))  # rollout 0 of prompt 1 has failed
    buffer._evict_terminal_groups(1, "train", ({uids[2]}, {uids[3]}, {uids[4]}, None))
    buffer._clear_groups("train", [uids[5]])
    buffer._clear_groups("val", ["1b4e28ba-2fa1-11d2-883f-0016d3cca427"])
    buffer._materialize_batch("train", [uids[6], uids[7]], [f"{uids[7]}_0_0"])
    stale = "requeued: stale" if on_stale == "requeue" else "dropped: stale"
    assert prompts.counts == {
        "trained": 2,
        "dropped: failed": 5,
        stale: 2,
        "dropped: filtered": 2,
        "requeued: surplus": 2,
    }
    assert [prompt.ordinal for prompt in prompts.issue(2)] == ([2, 5] if on_stale == "requeue" else [5, 8])
    with pytest.raises(StateError, match="was not wanted"):
        driver._step_once(SimpleNamespace(keys=keys[:1], tags=tags[:1]))


def test_the_state_lies_in_two_files(tmp_path: Path) -> None:
    driver = Driver(tmp_path, 2)
    attach(driver)
    driver.hand_out(3)
    assert isinstance(driver.train_dataloader, IssuedPrompts)
    assert (tmp_path / "global_step_3" / STATE).is_file()
