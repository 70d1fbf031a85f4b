"""A loop with Accelerate, under the contract of all hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("accelerate")

import torch

from megaresume.hosts.contract import HostContract
from megaresume.hosts.driver import Driver, Job
from tests.hosts.contract.forking import ForkingDriver, ask_to_stop, main, settings_of
from tests.hosts.hugging_face.accelerated import run
from tests.hosts.torch.program import Numbers

pytestmark = pytest.mark.process


def train(job: Job) -> None:
    """By the loop of `tests.hosts.hugging_face.accelerated`."""
    run(
        job.directory,
        data=Numbers(job.items),
        watch=lambda loop: ask_to_stop(job, loop.step),
        mistake=job.mistake,
        **settings_of(job),
    )


class TestAccelerate(HostContract):
    @staticmethod
    def checkpoints_of(directory: Path) -> Path:
        return directory / "checkpoints"

    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> Driver:
        return ForkingDriver(__file__, train)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(train)
