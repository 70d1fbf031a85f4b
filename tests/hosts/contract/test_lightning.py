"""Lightning's Trainer, under the contract of all hosts."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning as L
import torch

from megaresume.hosts.contract import HostContract
from megaresume.hosts.driver import Driver, Job
from tests.hosts.contract.forking import ForkingDriver, ask_to_stop, main, settings_of
from tests.hosts.lightning.program import run
from tests.hosts.torch.program import Numbers

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]


def train(job: Job) -> None:
    """By the Trainer of `tests.hosts.lightning.program`."""

    class Last(L.Callback):
        """Lightning saves nothing at the end of a run by itself."""

        def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
            trainer.save_checkpoint(job.directory.with_name("links") / "last.ckpt")

    def watch(trainer: L.Trainer) -> None:
        ask_to_stop(job, trainer.global_step)
        if job.mistake == "look" and trainer.global_step == 1:
            next(iter(trainer.train_dataloader))  # type: ignore[arg-type]

    run(
        job.directory,
        data=Numbers(job.items),
        ckpt=None if job.mistake == "load" else "last",
        watch=watch,
        callbacks=[Last()],
        **settings_of(job),
    )


class TestLightning(HostContract):
    @pytest.fixture(scope="class")
    @classmethod
    def driver(cls) -> Driver:
        return ForkingDriver(__file__, train)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(train)
