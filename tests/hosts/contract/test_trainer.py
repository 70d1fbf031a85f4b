"""Hugging Face's Trainer, under the contract of all hosts."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from transformers import TrainerCallback

import megaresume
from megaresume.hosts.contract import HostContract
from megaresume.hosts.driver import Driver, Job
from tests.hosts.contract.forking import ForkingDriver, ask_to_stop, main, staged, stop_of
from tests.hosts.hugging_face.program import Numbers, make

pytestmark = pytest.mark.process


def train(job: Job) -> None:
    """By the Trainer of `tests.hosts.hugging_face.program`."""
    trainer = make(
        job.directory,
        attempt=job.attempt,
        kill=job.kill,
        data=Numbers(job.items),
        per_device_train_batch_size=job.batch,
        gradient_accumulation_steps=job.accumulation,
        num_train_epochs=job.epochs,
        save_steps=job.save_every,
    )
    more: dict[str, Any] = {} if job.append is None else {"append": job.append}
    megaresume.attach(trainer, checkpoints=megaresume.Checkpoints(**staged(job)), stop=stop_of(job), **more)

    class Ask(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            ask_to_stop(job, state.global_step)

    trainer.add_callback(Ask())
    if job.mistake == "look":
        next(iter(trainer.get_train_dataloader()))
    trainer.train(resume_from_checkpoint=job.mistake != "load")


class TestTrainer(HostContract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> Driver:
        return ForkingDriver(__file__, train)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(train)
