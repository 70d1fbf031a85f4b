"""TRL's asynchronous GRPO, killed in its steps and started again: real trainer, worker process, loops and rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")

from megaresume.runs import prompts
from tests.hosts.trl.killed import run, server
from tests.release import release


@pytest.mark.process
@release(
    "TRL: four launches of two processes each, three of three, and three of two on new machines",
    "`tests/hosts/trl/test_parts.py::test_what_leaves_the_queue_is_wanted`, "
    "`tests/hosts/prompts/test_kills.py::test_killed_two_hundred_times`, "
    "`tests/hosts/prompts/test_kills.py::test_lost_machines`",
)
@pytest.mark.parametrize(("ranks", "kills", "on_new_machines"), [(1, 3, False), (2, 2, False), (1, 2, True)])
def test_killed_and_resumed(ranks: int, kills: int, on_new_machines: bool, tmp_path: Path) -> None:
    """On new machines from the newest checkpoint and the ledger alone."""
    with server(tmp_path) as port:
        found = run(
            tmp_path / "0-run",
            port,
            attached=True,
            kills=kills,
            seed=0,
            ranks=ranks,
            on_new_machines=on_new_machines,
        )
    assert found == {"kills": kills, "trained": 80, "repeated": 0, "lost": 0, "again": 0}
    proof = prompts.prove(tmp_path / "0-run" / "run")
    assert proof.holds, proof.problems
    assert proof.trained == 80
