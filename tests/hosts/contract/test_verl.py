"""VeRL's supervised trainer, under the contract of all hosts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megaresume.hosts.contract import HostContract
from megaresume.hosts.driver import Driver, Job, wait_for_copies
from tests.hosts.contract.forking import LaunchingDriver, die_if_asked, main, staged
from tests.hosts.verl.conftest import _python, python  # noqa: F401  fixtures
from tests.release import release

pytestmark = pytest.mark.process


def train(job: Job) -> None:
    """By the trainer of `tests.hosts.verl.program`."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "verl"))
    import torch.distributed as dist
    from program import Recorded, run

    class Driven(Recorded):
        """Is killed as the job says."""

        def _recorded(self, train: Any, data: Any) -> Any:
            output = super()._recorded(train, data)
            die_if_asked(job, self.count)
            wait_for_copies(job, self.count)
            return output

        def fit(self) -> None:
            if job.mistake == "look":
                next(iter(self.train_dataloader))
            super().fit()

    dist.init_process_group("gloo")
    run(
        job.directory,
        trainer_class=Driven,
        attempt=job.attempt,
        step=job.batch * job.accumulation * job.ranks,
        epochs=job.epochs + 1,
        items=job.items,
        kill=job.kill[1] if job.kill[0] == "save" else 0,
        append=job.append,
        checkpoints=staged(job),
        config=[
            f"data.micro_batch_size_per_gpu={job.batch}",
            f"trainer.total_training_steps={job.steps}",
            f"trainer.save_freq={job.save_every}",
            f"trainer.resume_mode={'disable' if job.mistake == 'load' else 'auto'}",
        ],
    )
    dist.destroy_process_group()


@release(
    "VeRL, which no extra installs; twenty launches of it",
    "`tests/hosts/contract/test_loop.py`, `tests/hosts/verl/test_parts.py`",
)
class TestVerl(HostContract):
    short_last_step = False  # VeRL drops what is no whole batch
    elastic = False  # and its FSDP saves a file for each rank, which only as many can load
    stops = False  # `attach` takes no `stop` for it

    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls, python: str) -> Driver:  # noqa: F811
        return LaunchingDriver(__file__, python)


if __name__ == "__main__":
    main(train)
