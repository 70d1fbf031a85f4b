"""A loop of one's own in torch, under the contract of all hosts."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megaresume.hosts.contract import HostContract
from megaresume.hosts.driver import Driver, Job
from tests.hosts.contract.forking import ForkingDriver, ask_to_stop, main, staged, stop_of
from tests.hosts.torch.program import Numbers, run

pytestmark = pytest.mark.process


def train(job: Job) -> None:
    """By the loop of `tests.hosts.torch.program`."""
    more: dict[str, Any] = {} if job.append is None else {"append": job.append}
    run(
        job.directory,
        attempt=job.attempt,
        kill=job.kill,
        data=Numbers(job.items),
        batch=job.batch,
        accumulation=job.accumulation,
        epochs=job.epochs,
        save_every=job.save_every,
        stop=stop_of(job),
        watch=lambda loop: ask_to_stop(job, loop.step),
        mistake=job.mistake,
        checkpoints=staged(job),
        **more,
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
