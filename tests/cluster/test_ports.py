"""The port at which ranks meet is one that nothing else comes to have in the meantime."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from megaresume.cluster import processes as jobs
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


def test_a_kept_port_is_given_to_nobody_else_and_may_be_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with jobs.keep_port() as kept:
        port, free = kept.getsockname()[1], jobs.free_port()
        drawn = iter([port, free])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(drawn))
        assert jobs.free_port() == free
        with socket.socket() as store:  # as torch's does
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("", port))
            store.listen()


@pytest.mark.process
def test_a_job_keeps_its_port_to_its_end(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, time\nprint(os.environ['MASTER_PORT'], flush=True)\ntime.sleep(600)\n")
    with jobs.LocalJob(str(program), [], num_processes=1, output=tmp_path / "output", launcher="env") as job:
        assert job.wait_until(lambda: job.text().endswith("\n"))
        port = int(job.text())
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
    with socket.socket() as other:
        other.bind(("", port))
