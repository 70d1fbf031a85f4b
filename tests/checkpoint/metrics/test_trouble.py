"""A sink that is away, slow or full stops no training, delays no end, and says so once: each sink, by its package."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.metrics.sinks import SINKS
from megaresume.cluster.processes import free_port
from tests.checkpoint.metrics.runs import config_of, write_sources
from tests.release import release

pytestmark = pytest.mark.process
PROGRAM, STEPS = Path(__file__).with_name("trouble.py"), 20


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sources")
    write_sources(directory)
    path = directory / "data.yaml"
    path.write_text(json.dumps(config_of(directory)))
    return path


@contextmanager
def full_disk(directory: Path) -> Iterator[Path]:
    """A disk without a free byte."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        with (directory / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@contextmanager
def mute_server() -> Iterator[int]:
    """A port where somebody accepts connections, and never says anything."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        yield int(server.getsockname()[1])


@contextmanager
def busy_server() -> Iterator[int]:
    """A port where every request is answered with 503."""

    class Busy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *words: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()


@contextmanager
def trouble(kind: str, directory: Path, name: str) -> Iterator[str]:
    """What stands after ``=`` of a sink.

    Args:
        kind: of `CASES`.
        directory: of the test.
        name: of what is made there.
    """
    directory = directory / f"for-{name}"
    directory.mkdir()
    if kind == "below a file":
        (directory / "file").write_text("a file where a directory should be")
        yield str(directory / "file" / "there")
    elif kind == "a pipe that nobody reads":
        os.mkfifo(directory / "pipe")
        pipe = os.open(directory / "pipe", os.O_RDWR | os.O_NONBLOCK)
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)  # so that it is full soon
        yield str(directory / "pipe")
        os.close(pipe)
    elif kind == "a full disk":
        with full_disk(directory / "full") as full:
            yield str(full / "there")
    elif kind == "nobody listens":
        yield f"http://127.0.0.1:{free_port()}"
    elif kind == "somebody is mute":
        with mute_server() as port:
            yield f"http://127.0.0.1:{port}"
    elif kind == "somebody is busy":
        with busy_server() as port:
            yield f"http://127.0.0.1:{port}"
    else:
        assert kind == "a port that is taken"
        with mute_server() as port:
            yield str(port)


CASES = {
    "jsonl": ("below a file", "a full disk", "a pipe that nobody reads"),
    "tensorboard": ("below a file", "a full disk"),
    "otlp": ("nobody listens", "somebody is busy", "somebody is mute"),
    "prometheus": ("a port that is taken",),
    "wandb": ("below a file",),
    "mlflow": ("below a file", "nobody listens", "somebody is busy", "a full disk", "somebody is mute"),
}


def test_each_sink_is_tried() -> None:
    assert set(CASES) == set(SINKS)


def trained(words: list[str], data: Path, directory: Path) -> list[str]:
    """What is said of the sinks while the run is measured, which is not stopped and not delayed."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(data), str(directory), str(STEPS), *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["steps"] == STEPS
    # Nobody would ever take what these sinks are given, or after minutes.
    assert answer["loop"] < 60 and answer["end"] < 30
    lines = [json.loads(line) for line in (directory / "run/megaresume/meter/figures.jsonl").open()]
    assert lines[-1]["step"] == STEPS and lines[-1]["samples"] == 8 * STEPS
    return [line.partition("megaresume: metrics: ")[2] for line in done.stderr.splitlines() if " metrics: " in line]


def is_installed(word: str) -> bool:
    return all(importlib.util.find_spec(name.partition(".")[0]) for name in SINKS[word].modules)


def test_all_at_once(data: Path, tmp_path: Path) -> None:
    words = [word for word in CASES if is_installed(word)]
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(trouble(CASES[word][-1], tmp_path, word)) for word in words]
        said = trained([f"{word}={where}" for word, where in zip(words, places, strict=True)], data, tmp_path)
    for word in words:
        mine = [line.removeprefix(f"{word} ").split()[0] for line in said if line.startswith(f"{word} ")]
        assert mine in (["fails:", "missed"], ["takes", "missed"], ["missed"]), said


@release("a process for each sink and trouble", "`tests/checkpoint/metrics/test_trouble.py::test_all_at_once`")
@pytest.mark.parametrize(("word", "kind"), [(word, kind) for word, kinds in CASES.items() for kind in kinds])
def test_one_alone(word: str, kind: str, data: Path, tmp_path: Path) -> None:
    if not is_installed(word):
        pytest.skip(f"needs the package of {word}")
    with trouble(kind, tmp_path, word) as where:
        said = trained([f"{word}={where}"], data, tmp_path)
    assert [line.removeprefix(f"{word} ").split()[0] for line in said] in (
        ["fails:", "missed"],
        ["takes", "missed"],
        ["missed"],
    ), said
