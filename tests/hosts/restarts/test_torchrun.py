"""Workers that torchrun's agents start again in place, with as many as are there: ``--nnodes 1:2``, SIGKILL, the same
steps as of one worker that nobody disturbed. DeepSpeed's engine: `tests/cluster/training/test_restart_in_place.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.restarts.agents import PROGRAM, Recorded
from tests.hosts.restarts.program import BATCH, GLOBAL, Record, judge
from tests.hosts.torch.record import launch
from tests.release import release


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Recorded]]:
    """``make(options of the program)``; all is ended after the test."""
    made: list[Recorded] = []

    def agents(**options: Any) -> Recorded:
        made.append(Recorded(tmp_path / "job", **options))
        return made[-1]

    yield agents
    for one in made:
        one.close()


@pytest.fixture
def undisturbed(tmp_path: Path) -> Callable[[Path, int], Record]:
    """A run of one worker."""

    def of(program: Path, steps: int) -> Record:
        done = launch(program, tmp_path / "whole", 1, steps=steps, save_every=steps)
        assert done.returncode == 0, done.stderr[-3000:]
        return judge(tmp_path / "whole")

    return of


def agree(found: Record, expected: Record, last: int | None = None) -> None:
    """The same items in the same order in every step, and weights that differ by rounding alone."""
    last = last or max(found.steps)
    for step in range(1, last + 1):
        assert len(found.steps[step]) == GLOBAL
        # The order within a step: micro-batch by micro-batch, rank by rank, as the stream has it.
        assert found.steps[step] == expected.steps[step], step
        assert found.weights[step] == pytest.approx(expected.weights[step], rel=1e-5), step


def lost_and_won(make: Callable[..., Recorded], undisturbed: Callable[[Path, int], Record], program: Path) -> None:
    """An agent is killed with its worker, the other one goes on alone, and another one comes."""
    steps = 4000  # never reached
    job = make(program=program, steps=steps, seconds=0.02)
    job.start("one")
    job.start("two")
    reached = job.until_trained(ranks=2, beyond=4)
    job.kill("two")
    reached = job.until_trained(ranks=1, beyond=reached)
    job.start("three")
    reached = job.until_trained(ranks=2, beyond=reached)
    job.close()
    found = judge(job.directory)
    agree(found, undisturbed(program, reached), reached)
    # Of the groups of workers, one after the other; some of their steps may be made again by the next one.
    groups = sorted({(line["launch"], line["ranks"]) for line in job.lines()})
    changes = [ranks for k, (_, ranks) in enumerate(groups) if k == 0 or ranks != groups[k - 1][1]]
    assert changes[-3:] == [2, 1, 2] and BATCH * 2 < GLOBAL


@release(
    "five starts of two agents",
    "`tests/cluster/training/test_restart_in_place.py::test_nodes_are_lost_and_won`",
)
def test_an_agent_is_lost_and_one_comes(
    make: Callable[..., Recorded], undisturbed: Callable[[Path, int], Record]
) -> None:
    lost_and_won(make, undisturbed, PROGRAM)


@release(
    "five starts of two agents",
    "`tests/cluster/training/test_restart_in_place.py::test_nodes_are_lost_and_won`",
)
def test_a_trainer_loses_an_agent_and_one_comes(
    make: Callable[..., Recorded], undisturbed: Callable[[Path, int], Record]
) -> None:
    """Hugging Face's."""
    lost_and_won(make, undisturbed, PROGRAM.with_name("trainer.py"))
