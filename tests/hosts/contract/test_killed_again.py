"""Killed again and again, on one rank and on two: the trainers that load on another number of ranks.

A loop of one's own does it in `tests/hosts/torch/test_loop.py`, with every writer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from megaresume.hosts.driver import Job, items, trained
from tests.hosts.contract.forking import ForkingDriver
from tests.release import release

pytestmark = pytest.mark.process

#: of each launch: ranks; where and in which step it is killed; samples of a micro-batch.
LAUNCHES: list[tuple[int, Literal["", "save", "step"], int, int]] = [
    (1, "step", 7, 4),
    (2, "save", 10, 2),
    (1, "step", 13, 3),
    (2, "save", 20, 1),
    (2, "", 0, 3),
]


@release(
    "six launches for each trainer, three of two ranks",
    "`tests/hosts/contract/test_trainer.py`, `tests/hosts/contract/test_accelerate.py`, "
    "`tests/hosts/contract/test_lightning.py`",
)
@pytest.mark.parametrize("trainer", ["trainer", "accelerate", "lightning"])
def test_killed_again_and_again_on_one_rank_and_on_two(trainer: str, tmp_path: Path) -> None:
    module = pytest.importorskip(f"tests.hosts.contract.test_{trainer}")
    driver = ForkingDriver(module.__file__, module.train)
    ran = driver.run(Job(directory=tmp_path / "whole"))
    assert ran.status == 0, ran.said[-3000:]
    for attempt, (ranks, where, step, batch) in enumerate(LAUNCHES, start=1):
        job = Job(
            directory=tmp_path / "run", attempt=attempt, ranks=ranks, batch=batch, save_every=5, kill=(where, step)
        )
        ran = driver.run(job)
        assert (ran.status == 0) == (not where), ran.said[-3000:]
    assert items(trained(tmp_path / "run")) == items(trained(tmp_path / "whole"))
