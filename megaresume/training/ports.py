"""A port at which the ranks of a job on this machine meet."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

from megaresume.stream.errors import SetupError

__all__ = ["free_port"]

_FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A TCP port that nobody listens on.

    Not one of those that the system gives to outgoing connections: a job's own ranks, or another job, may be given it
    between this call and the moment at which rank 0 listens.

    Raises:
        SetupError: there is none.
    """
    last = 32_768
    with contextlib.suppress(OSError, ValueError, IndexError):
        last = max(int(_RANGE.read_text().split()[0]), _FIRST + 1)
    draw = random.SystemRandom()  # jobs that start at the same moment must not try the same ones
    for _ in range(200):
        port = draw.randrange(_FIRST, last)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise SetupError(
        "no free port was found for the ranks to meet at",
        found=f"200 ports between {_FIRST} and {last} are in use",
        action="end other jobs on this machine, or set MASTER_ADDR and MASTER_PORT yourself",
    )
