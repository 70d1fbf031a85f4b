"""Megatron-Bridge's ``pretrain``, under the contract of all hosts."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from megaresume.hosts.contract import HostContract
from megaresume.hosts.driver import Driver, Job
from tests.hosts.contract.forking import LaunchingDriver, main
from tests.hosts.megatron_bridge.conftest import python  # noqa: F401  a fixture
from tests.release import release

pytestmark = pytest.mark.process


def train(job: Job) -> None:
    """By Bridge's own loop, as `tests.hosts.megatron_bridge.program` configures it."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "megatron_bridge"))
    from program import Recorder, run

    class Driven(Recorder):
        """Reads what it does not train, and is killed, as the job says."""

        def forward_step(self, state: Any, data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
            if job.mistake == "look" and state.train_state.step == 0 and not self.rows:
                next(data_iterator)
            return super().forward_step(state, data_iterator, model, return_schedule_plan)

        def on_train_step_end(self, context: Any) -> None:
            super().on_train_step_end(context)
            if job.kill == ("step", context.state.train_state.step + 1):
                os.killpg(os.getpgrp(), signal.SIGKILL)  # and the processes that help it to write

    run(
        job.directory,
        attempt=job.attempt,
        iters=job.steps,
        step=job.batch * job.accumulation * job.ranks,
        batch=job.batch,
        interval=job.save_every,
        items=job.items,
        kill=job.kill[1] if job.kill[0] == "save" else 0,
        append=job.append,
        checkpoint={"load": None} if job.mistake == "load" else None,
        recorder_class=Driven,
    )


@release(
    "Megatron-Bridge, which no extra installs, on a Python of its own; twenty launches of it",
    "`tests/hosts/contract/test_loop.py`, `tests/hosts/megatron_bridge/test_parts.py`",
)
class TestMegatronBridge(HostContract):
    short_last_step = False  # Bridge counts steps of one size
    stops = False  # Bridge has signals of its own, and `attach` takes no `stop`
    stages = False  # it looks for a checkpoint before it asks megaresume
    random_state = ""  # Bridge restores it

    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls, python: str) -> Driver:  # noqa: F811
        return LaunchingDriver(__file__, python)


if __name__ == "__main__":
    main(train)
