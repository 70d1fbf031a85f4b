"""The port at which ranks meet is one that nothing else comes to have in the meantime."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from megaresume.cluster import local as jobs
from megaresume.stream.errors import SetupError


def test_no_port_of_outgoing_connections() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = [jobs.free_port() for _ in range(50)]
    assert all(10_000 <= port < lowest for port in found)
    assert len(set(found)) > 40


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        taken, free = busy.getsockname()[1], jobs.free_port()
        drawn = iter([taken, taken, free])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(drawn))
        assert jobs.free_port() == free
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: taken)
        with pytest.raises(SetupError, match="no free port"):
            jobs.free_port()
