"""torchtitan's Trainer, under the contract of all hosts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import megaresume
from megaresume.hosts.contract import HostContract
from megaresume.hosts.driver import Driver, Job
from tests.hosts.contract.forking import LaunchingDriver, ask_to_stop, die_if_asked, main, staged, stop_of
from tests.hosts.torchtitan.conftest import _python, python  # noqa: F401  fixtures
from tests.release import release

pytestmark = pytest.mark.process


def train(job: Job) -> None:
    """By the Trainer of `tests.hosts.torchtitan.program`."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "torchtitan"))
    import torch
    from program import Recorded, config_of, die_in_save_of, register

    class Driven(Recorded):
        """Is stopped and killed as the job says."""

        def train_step(self, batches: Any) -> None:
            super().train_step(batches)
            die_if_asked(job, self.step)
            ask_to_stop(job, self.step)

    register(job.items, **{} if job.append is None else {"append": job.append})
    megaresume.attach(Driven, checkpoints=megaresume.Checkpoints(**staged(job)), stop=stop_of(job))
    step, more = job.batch * job.accumulation * job.ranks, {"checkpoint.interval": job.save_every}
    config = config_of(job.directory, batch=job.batch, step=step, steps=job.steps, **more)
    trainer = Driven(config, job.directory, job.attempt)
    if job.kill[0] == "save":
        die_in_save_of(job.kill[1], trainer)
    if job.mistake == "look":
        next(iter(trainer.dataloader))
    try:
        trainer.train()
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


@release(
    "torchtitan, which no extra installs; thirty launches of it",
    "`tests/hosts/contract/test_loop.py`, `tests/hosts/torchtitan/test_parts.py`",
)
class TestTorchtitan(HostContract):
    short_last_step = False  # torchtitan counts steps of one size
    asks_for_load = False  # and loads by itself

    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls, python: str) -> Driver:  # noqa: F811
        return LaunchingDriver(__file__, python)


if __name__ == "__main__":
    main(train)
