"""Agents of torchrun, one a node, that start their workers again in place with as many as are there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from megaresume.cluster.local import free_port
from tests.hosts.torch.record import ENVIRONMENT

PROGRAM = Path(__file__).with_name("program.py")


class Agents:
    """Of one job: ``torchrun --nnodes 1:2``, a worker each. End them by `close`.

    Args:
        directory: what the program is given, and where the agents' output goes.
        options: of the program.
    """

    def __init__(self, directory: Path, **options: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self._port = directory, free_port()
        self._words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"]
        self._words += ["--max-restarts=100", "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-id=job"]
        self._words += [f"--rdzv-endpoint=127.0.0.1:{self._port}"]
        self._words += ["--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=12,last_call_timeout=1"]
        self._words += [str(PROGRAM), str(directory), json.dumps(options)]
        # The workers of a restart would find the addresses of those before them.
        self._env = os.environ | ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.alive: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """One more. The first one hosts the place where they meet, and has to stay."""
        is_first = not self.alive
        with (self.directory / f"{name}.txt").open("ab") as out:
            self.alive[name] = subprocess.Popen(
                self._words, env=self._env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
        while is_first and self.alive[name].poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
                return
            time.sleep(0.05)

    def kill(self, name: str) -> None:
        """SIGKILL the agent and its worker; the agent first, or it would start it again."""
        agent = self.alive.pop(name)
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(agent.pid)
            for process in [top, *top.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        agent.wait()

    def close(self) -> None:
        """End all."""
        for name in list(self.alive):
            self.kill(name)

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

        def newest(lines: list[Any]) -> int:
            last = max((line["launch"] for line in lines), default=0)
            return max((line["step"] for line in lines if line["launch"] == last and line["ranks"] == ranks), default=0)

        self.until(lambda lines: newest(lines) > beyond)
        return newest(self.lines())

    def text(self, name: str) -> str:
        """What an agent and its workers have printed."""
        return (self.directory / f"{name}.txt").read_text(errors="replace")

    def lines(self) -> list[Any]:
        """Of the record; a last one that is being written is left out."""
        directory = self.directory / "record"
        texts = [path.read_text() for path in directory.iterdir()] if directory.exists() else []
        return [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]
