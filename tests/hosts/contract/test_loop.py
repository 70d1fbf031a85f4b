"""A loop of one's own in torch, under the contract of all hosts."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from megaresume.hosts.contract import HostContract
from megaresume.hosts.driver import Driver, Job
from tests.hosts.contract.forking import ForkingDriver, ask_to_stop, main, settings_of
from tests.hosts.torch.program import Numbers, run

pytestmark = pytest.mark.process


def train(job: Job) -> None:
    """By the loop of `tests.hosts.torch.program`."""
    run(
        job.directory,
        data=Numbers(job.items),
        watch=lambda loop: ask_to_stop(job, loop.step),
        mistake=job.mistake,
        **settings_of(job),
    )


class TestLoop(HostContract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> Driver:
        return ForkingDriver(__file__, train)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ["WORLD_SIZE"] != "1":
        dist.init_process_group("gloo")
    main(train)
