"""The processes that this pytest has programs forked from, and the tests whose programs are started; see `forked`."""

from __future__ import annotations

import _posixsubprocess
import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests import forked

#: files and folders whose programs are forked.
FORKED = (
    "batches/test_agreement.py",
    "batches/test_loader.py",
    "batches/test_main_guard.py",
    "benchmarks/test_benchmarks.py",
    "benchmarks/test_peers.py",
    "checkpoint/metrics/test_record.py",
    "checkpoint/metrics/test_run.py",
    "checkpoint/metrics/test_trouble.py",
    "checkpoint/store/test_nodes.py",
    "checkpoint/store/test_position.py",
    "checkpoint/test_meeting.py",
    "cli/test_new.py",
    "cli/test_plan_megatron.py",
    "cli/test_plan_training.py",
    "cluster/demo",
    "cluster/training",
    "data/test_disk_cache.py",
    "data/test_remote.py",
    "data/test_store_counts.py",
    "docs/test_hosts_document.py",
    "docs/test_stream_document.py",
    "hosts",
    "runs/newest",
    "runs/replay",
    "runs/trace",
)

_REAL = _posixsubprocess.fork_exec
_BASE = dict(os.environ)
_PLACES = tuple(f"tests/{place}" for place in FORKED)
_is_on = False


@functools.cache
def warm(parity: int, modules: tuple[str, ...]) -> forked.Warm:
    """One for even ranks, one for odd ones; they end with this process, whose end of a socket they read from."""
    # transformers imports pyarrow, whose allocator would start a thread
    env = _BASE | forked.ENVIRONMENT | forked.ROOM | {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [forked.__file__, str(theirs.fileno()), *modules]
    with theirs:
        if modules:
            files = [os.open(os.devnull, os.O_RDWR)] * 3
            program = forked.Program(words=words, env=env, cwd=os.getcwd(), files=[0, 1, 2, theirs.fileno()])
            warm(parity, ()).start(program, [*files, theirs.fileno()])
            os.close(files[0])
        else:
            command = [sys.executable, *words]
            with starting():
                subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2)
    ours.recv(100)  # it is ready
    return forked.Warm(ours)


def pytest_configure(config: pytest.Config) -> None:
    """Where tests run."""
    config.addinivalue_line("markers", "cold: programs of these tests are started, not forked; see tests/warm.py")
    forked.install(forked.forking(_of, _BASE, _REAL))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a fixture starts, the first test that uses it decides."""
    global _is_on
    _is_on = item.nodeid.startswith(_PLACES) and item.get_closest_marker("cold") is None


def forking() -> contextlib.AbstractContextManager[None]:
    """Programs are forked meanwhile."""
    return _switched(True)


def starting() -> contextlib.AbstractContextManager[None]:
    """Programs are started meanwhile."""
    return _switched(False)


@contextlib.contextmanager
def _switched(value: bool) -> Iterator[None]:
    global _is_on
    was, _is_on = _is_on, value
    try:
        yield
    finally:
        _is_on = was


def run_program(
    words: Sequence[str], env: Mapping[str, str], directory: Path, output: Path, *, kill_at: str = ""
) -> tuple[int, list[str]]:
    """A program of one process, to its end.

    Args:
        words: script and arguments.
        env: all of its environment.
        directory: where it runs.
        output: a new file, for what it says.
        kill_at: it is killed with SIGKILL once it has said a line that begins so.

    Returns:
        exit status, negative for a signal; the lines that it said.
    """
    command = [sys.executable, *words]
    with open(output, "wb") as file:
        program = subprocess.Popen(command, env=env, cwd=directory, stdout=file, stderr=subprocess.STDOUT)
    while program.poll() is None:
        said = output.read_text(encoding="utf-8") if kill_at else ""
        if any(line.startswith(kill_at) for line in said.splitlines()[:-1]):
            program.kill()
            program.wait()
        time.sleep(0.01)
    return program.returncode, output.read_text(encoding="utf-8").splitlines()


def _of(words: list[str], env: Mapping[str, str], directory: str) -> forked.Warm | None:
    return warm(int(env.get("RANK", 0)) % 2, _modules_of(words, Path(directory))) if _is_on else None


def _modules_of(words: Sequence[str], directory: Path) -> tuple[str, ...]:
    """Those of `forked.OF_TRAINERS`, if the program speaks of one of them."""
    paths = [directory / word for word in words if word.endswith(".py")]
    texts = [path.read_text(encoding="utf-8") for path in paths if path.exists()]
    return forked.OF_TRAINERS if any(name in text for name in forked.OF_TRAINERS for text in texts) else ()
