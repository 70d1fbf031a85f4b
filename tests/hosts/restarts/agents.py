"""Agents of torchrun, one a node, that start their workers again in place with as many as are there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaresume.cluster.processes import free_port
from tests.agents import Agents
from tests.hosts.restarts.program import lines_of, newest_step
from tests.hosts.torch.record import ENVIRONMENT

PROGRAM = Path(__file__).with_name("program.py")


class Recorded(Agents):
    """Of one job of `PROGRAM`: ``torchrun --nnodes 1:2``, a worker each.

    Args:
        directory: what the program is given, and where the agents' output goes.
        program: that is trained.
        options: of the program.
    """

    def __init__(self, directory: Path, program: Path = PROGRAM, **options: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        port = free_port()
        words = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=100", "--monitor-interval=0.1"]
        words += ["--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint=127.0.0.1:{port}"]
        words += ["--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=12,last_call_timeout=1"]
        words += [str(program), str(directory), json.dumps(options)]
        super().__init__(directory, words, ENVIRONMENT, port)

    def until(self, happened: Callable[[list[Any]], bool]) -> None:
        """Wait for something in the record, whose lines are given in the order in which they were written."""
        deadline = time.monotonic() + 300
        while not happened(self.lines()):
            for name, agent in self.alive.items():
                assert agent.poll() in (None, 0), f"{name}: {self.text(name)[-3000:]}"
            assert time.monotonic() < deadline, "\n".join(self.text(name)[-3000:] for name in self.alive)
            time.sleep(0.05)

    def until_trained(self, *, ranks: int, beyond: int) -> int:
        """Wait until so many ranks have made a step beyond this one; returns it."""
        self.until(lambda lines: newest_step(lines, ranks) > beyond)
        return newest_step(self.lines(), ranks)

    def lines(self) -> list[Any]:
        """See `lines_of`."""
        return lines_of(self.directory)
