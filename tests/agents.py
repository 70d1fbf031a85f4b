"""Agents of torchrun on this machine, each of which stands for a node and dies with all of its workers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil


class Agents:
    """Of one job. End them by `close`.

    Args:
        directory: where their output goes: ``NAME.txt``.
        words: of torchrun.
        env: variables on top of this process's.
        port: where the first one hosts the place at which they meet; None: there is no such place.
        cwd: where they run; None: where this process does.
    """

    def __init__(
        self,
        directory: Path,
        words: Sequence[str],
        env: Mapping[str, str],
        port: int | None,
        cwd: Path | None = None,
    ) -> None:
        self.directory, self._port, self._cwd = directory, port, cwd
        self._command = [sys.executable, "-m", "torch.distributed.run", *words]
        # The workers of a restart would find the addresses of those before them.
        self._env = os.environ | dict(env) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.alive: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """One more. The first one hosts the place where they meet, and is the only one that must stay."""
        is_first = not self.alive and self._port is not None
        with (self.directory / f"{name}.txt").open("ab") as out:
            self.alive[name] = subprocess.Popen(
                self._command,
                cwd=self._cwd,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        while is_first and self.alive[name].poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
                return
            time.sleep(0.05)

    def kill(self, name: str) -> None:
        """SIGKILL the agent and everything below it; the agent first, or it would start its workers again."""
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

    def text(self, name: str) -> str:
        """What one has printed."""
        return (self.directory / f"{name}.txt").read_text(errors="replace")
