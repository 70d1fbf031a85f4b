"""Ranks that wait for each other in a `Meeting`, and one that fails, or is gone as if its node was lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megaresume.cluster.processes import free_port
from tests.forked import ENVIRONMENT

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("meeting.py")
#: seconds; the ranks themselves are far more patient.
SOON = 60.0


class Rank(subprocess.Popen[bytes]):
    """Runs `meeting.py`; no launcher ends it if another one is killed."""

    def said(self) -> str:
        """Its output, at its end."""
        deadline = time.monotonic() + SOON
        while self.poll() is None:
            assert time.monotonic() < deadline, "it still waits"
            time.sleep(0.01)
        return self.output.read_text()

    def __init__(self, words: str, env: dict[str, str], output: Path) -> None:
        self.output = output
        command = [sys.executable, str(PROGRAM), *words.split()]
        with open(output, "wb") as file:
            super().__init__(command, env=env, stdout=file, stderr=subprocess.STDOUT)


@contextmanager
def ranks(directory: Path, *words: str) -> Iterator[list[Rank]]:
    """Each does what its words say."""
    port, number = str(free_port()), str(len(words))
    env = os.environ | ENVIRONMENT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": number}
    started = [Rank(one, env | {"RANK": str(k)}, directory / str(k)) for k, one in enumerate(words)]
    try:
        yield started
    finally:
        for rank in started:
            if rank.poll() is None:
                os.kill(rank.pid, signal.SIGKILL)
                rank.wait()


def notice(left: list[Rank]) -> bool:
    """Whether all of these end because another one has; those who know it in the same words say it once."""
    said = "".join([rank.said() for rank in left])
    assert [rank.returncode for rank in left] == [1] * len(left), said
    return "a rank has ended while others waited for it in load_checkpoint()" in said


@pytest.mark.parametrize(("victim", "place"), [(2, "gate"), (1, "end"), (0, "end")])
def test_a_rank_is_killed_while_the_others_wait(tmp_path: Path, victim: int, place: str) -> None:
    """Rank 0 is the one with the store."""
    words = [f"gate {place}"] * 3
    words[victim] = "gate die-after=5"
    with ranks(tmp_path, *words) as started:
        left = [rank for number, rank in enumerate(started) if number != victim]
        assert notice(left) and all(rank.said().startswith("passed\n") for rank in left)


def test_a_rank_was_killed_before_the_others_came(tmp_path: Path) -> None:
    with ranks(tmp_path, "gone=2 gate", "gone=2 end", "die-after=0") as started:
        started[2].wait()  # until then there is a process of this number
        assert notice(started[:2])


def test_a_failure_is_told_at_the_gate_and_the_ranks_continue_together(tmp_path: Path) -> None:
    with ranks(tmp_path, "gate end", "fail end", "gate end") as started:
        failure = "Failure(words='rank 1: no such file', is_final=False)\n"
        elsewhere = "another rank has failed\n" + failure
        assert [rank.said() for rank in started] == [elsewhere, failure, elsewhere]


def test_a_final_failure_is_told_to_those_who_wait_for_another_rank(tmp_path: Path) -> None:
    with ranks(tmp_path, "gate end", "fail-for-good end", "stay") as started:
        failure = "Failure(words='rank 1: no such file', is_final=True)\n"
        assert [rank.said() for rank in started[:2]] == ["another rank has failed\n" + failure, failure]
