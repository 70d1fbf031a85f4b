"""VeRL's reinforcement learning, killed at a moment that is drawn and started again: its own trainers, Ray,
TransferQueue, agent loops and FSDP; rollouts of a tiny model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("trl")  # the tiny model is that of TRL's tests

from megaresume.runs import prompts
from tests.hosts.torch.record import ENVIRONMENT
from tests.hosts.verl.killed import STEPS, run
from tests.release import release


@release(
    "VeRL: two launches of ten processes each",
    "`tests/hosts/verl/test_prompt_parts.py::test_prompts_resume`, "
    "`tests/hosts/verl/test_prompt_parts.py::test_what_becomes_of_a_group`, "
    "`tests/hosts/verl/test_separate_parts.py::test_what_was_in_flight_is_fed_first`",
)
@pytest.mark.parametrize("mode", ["sync", "colocate_async", "old", "one_step_off", "fully_async"])
def test_killed_and_resumed(python: str, mode: str, tmp_path: Path) -> None:
    found = run(python, tmp_path / mode, mode=mode, attach={}, kills=1, seed=1)
    assert found == {"kills": 1, "trained": 4 * STEPS, "repeated": 0, "lost": 0, "again": 0}
    proof = prompts.prove(tmp_path / mode / "run")
    assert proof.holds, proof.problems
    assert proof.trained == 4 * STEPS


@release("VeRL: Ray, with eight processes", "`tests/hosts/prompts/test_kills.py::test_killed_two_hundred_times`")
def test_an_actor_for_many_workers(python: str) -> None:
    program = Path(__file__).with_name("ray_actor.py")
    environment = ENVIRONMENT | {"HOME": str(Path.home())}
    done = subprocess.run([python, str(program)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"1": 240}
