"""A program that is forked sees, and shows, what one that is started does; only its modules are there already."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.warm import forking, starting

pytestmark = pytest.mark.process

LOOK = """
import atexit, json, multiprocessing, os, subprocess, sys, threading

def there(answer):
    answer.put([__name__, os.getppid()])

if __name__ == "__main__":
    atexit.register(print, "at exit")
    shown = dict(pair.split("=", 1) for pair in open("/proc/self/environ").read().split("\\0") if "=" in pair)
    own = "import os, sys; print(os.getppid(), sys.argv, sys.stdin.read()); sys.exit(3)"
    child = subprocess.run([sys.executable, "-c", own, "word"], capture_output=True, text=True, input="said")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=there, args=(queue,))
    process.start()
    name, parent = queue.get()
    process.join()
    files = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2}
    threading.Timer(0.1, print, ["a thread ends"]).start()
    print(json.dumps({
        "argv": sys.argv, "path": sys.path[:4], "cwd": os.getcwd(), "main": [__name__, __file__], "doc": __doc__,
        "environment": dict(os.environ) == shown, "mark": os.environ["MARK"], "input": sys.stdin.read(),
        "session": os.getsid(0) == os.getpid(), "group": os.getpgrp() == os.getpid(), "parent": os.getppid(),
        "child": [child.returncode, child.stdout.replace(str(os.getpid()), "ME")],
        "spawned": [name, parent == os.getpid(), process.exitcode],
        "files": sorted(file for file in files if file.startswith("/") and not file.startswith(("/proc", "/dev"))),
        "torch": "torch" in sys.modules,
    }), flush=True)
"""


def look(directory: Path, *words: str, **options: Any) -> dict[str, Any]:
    (directory / "look.py").write_text(LOOK)
    env = os.environ | {"MARK": "of the environment", "PYTHONPATH": f"{directory}:{Path(__file__).parents[1]}"}
    done = subprocess.run(
        [sys.executable, *words], cwd=directory, env=env, capture_output=True, text=True, input="words", **options
    )
    assert done.returncode == 0, done.stderr
    first, *others = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(first)
    assert found.pop("parent") == os.getpid()
    return found | {"said": others}


@pytest.mark.parametrize("words", [("look.py", "a", "b"), ("-u", "-m", "look", "--flag")], ids=["script", "module"])
@pytest.mark.parametrize("session", [False, True])
def test_it_looks_the_same(tmp_path: Path, words: tuple[str, ...], session: bool) -> None:
    with starting():
        started = look(tmp_path, *words, start_new_session=session)
    with forking():
        forked = look(tmp_path, *words, start_new_session=session)
    assert (started.pop("torch"), forked.pop("torch")) == (False, True)
    assert forked == started
    assert started["said"] == ["a thread ends", "at exit"] and started["session"] == session


ENDS = {
    "a status": "import sys; sys.exit(7)",
    "words": "import sys; print('out'); sys.exit('why')",
    "an error": "print('out')\n1 / 0",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "interrupted": "raise KeyboardInterrupt",
    "at once": "import os; print('never written', end=''); os._exit(4)",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_it_ends_the_same(code: str) -> None:
    def run() -> tuple[int, str, str]:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    with starting():
        started = run()
    with forking():
        assert run() == started


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What a shell starts in the background ignores SIGINT, and so does all that it starts: not here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", [forking, starting])
@pytest.mark.usefixtures("interruptible")
def test_signals_reach_it(kind: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """And nothing of it is left that keeps its output open."""
    code = "import sys, time; print('there', flush=True); time.sleep(1000)"
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        with kind():
            process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        process.send_signal(number)
        assert process.wait() == -number and process.stdout.read() == b""
        process.stdout.close()


#: what is read of a module is what is in its file.
READ = """
import dataclasses, sys
import megaresume.hosts.loop, megatron.core.parallel_state

names = [name for name in sys.modules if name.split(".")[0] in ("megaresume", "megatron")]
for name in names:
    module = sys.modules[name]
    if getattr(module, "__file__", None):
        source = open(module.__file__, encoding="utf-8").read()
        code = compile(source, module.__file__, "exec", dont_inherit=True)
        assert module.__spec__.loader.get_code(name) == code, name
print(len(names) > 50, dataclasses.asdict(dataclasses.make_dataclass("Made", ["field"])(1)))
"""


def test_modules_that_were_read_before_the_fork_are_those_of_their_files() -> None:
    pytest.importorskip("megatron.core")
    for kind in (starting, forking):
        with kind():
            done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True)
        assert done.stdout == "True {'field': 1}\n", done.stderr
