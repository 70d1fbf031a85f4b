"""What writes the files of a checkpoint for a rank ends with it, and writes into no checkpoint of the next start."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megaresume.checkpoint.load.choose import choose
from megaresume.cluster.processes import free_port
from tests.hosts.megatron.conftest import MINI, SCRIPTS, Mini

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.process

#: A rank whose writer was there before it saved, as one that megatron-core keeps: argv[1] is how it was started. Both
#: it and a process that it forks hold the lock of the file argv[2].
KEPT = """
import fcntl, multiprocessing, os, signal, sys, time
from megaresume.hosts.writers import written_with_us

def kept(queue):
    while True:
        queue.get()()

def write():
    global file
    file = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND)
    fcntl.flock(file, fcntl.LOCK_EX)
    multiprocessing.get_context("fork").Process(target=forked, args=(os.getppid(),)).start()
    time.sleep(1000)

def forked(owner):
    os.kill(int(os.environ["OWNER"]), signal.SIGKILL)
    time.sleep(1000)

if __name__ == "__main__":
    os.environ["OWNER"] = str(os.getpid())
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    context.Process(target=kept, args=(queue,)).start()
    queue.put(written_with_us(write))
    time.sleep(1000)
"""

#: Trains, and every rank ends with one error at the step after the save of step 4, whose writers wait for that.
REFUSED = """
import builtins, os, runpy, sys, time

from torch.optim.optimizer import register_optimizer_step_pre_hook

from megaresume.checkpoint import ending
from megaresume.checkpoint.ranks import known_to_all
from megaresume.stream.errors import StateError

ending.END_PATIENCE = 600
program, refused, original, steps = *sys.argv[1:3], builtins.open, []

def late(path, *args, **kwargs):
    while "iter_0000004" in str(path) and ".distcp" in str(path) and not os.path.exists(refused):
        time.sleep(0.01)
    return original(path, *args, **kwargs)

def refuse(*_):
    steps.append(None)
    if len(steps) == 5:
        original(refused, "w").close()
        raise known_to_all(StateError("something is refused"))

builtins.open = late
register_optimizer_step_pre_hook(refuse)
sys.argv[:3], sys.path[0] = [program], os.path.dirname(program)
runpy.run_path(program, run_name="__main__")
"""


def wait_for_all_that_hold(path: Path) -> None:
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@pytest.mark.parametrize("flags", [[], ["--async-save"]], ids=["synchronous", "asynchronous"])
def test_none_outlives_its_rank(data_yaml: Path, tmp_path: Path, flags: list[str]) -> None:
    """The rank is killed when they are about to write, by themselves; a filesystem may hang there for as long as it
    takes to come to the same step again."""
    words = ["--megaresume-data", data_yaml, "--seed", 7, "--seq-length", 32, "--vocab-size", 65, "--train-iters", 4]
    words += ["--micro-batch-size", 2, "--global-batch-size", 8, "--save", tmp_path / "save", "--save-interval", 2]
    command = [sys.executable, "-m", "megaresume.run", MINI / SCRIPTS[0], *words, "--load", tmp_path / "save", *flags]
    command += ["--ckpt-format", "torch_dist", "--mini-log", tmp_path / "log"]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    variables = {**rank, "MASTER_PORT": str(free_port()), "MINI_OUTLIVE": f"4:{tmp_path / 'outlived'}"}
    with open(tmp_path / "output", "wb") as output:
        done = subprocess.run([*map(str, command)], env=os.environ | variables, stdout=output, stderr=output)
    assert done.returncode == -signal.SIGKILL, (tmp_path / "output").read_text()[-3000:]
    wait_for_all_that_hold(tmp_path / "outlived")
    assert (tmp_path / "outlived").read_text() == ""
    assert not list((tmp_path / "save").glob("iter_0000004/*.distcp"))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_one_that_is_kept_ends_too(tmp_path: Path, method: str) -> None:
    (tmp_path / "program.py").write_text(KEPT)
    (tmp_path / "held").touch()
    done = subprocess.run([sys.executable, tmp_path / "program.py", method, tmp_path / "held"])
    assert done.returncode == -signal.SIGKILL
    wait_for_all_that_hold(tmp_path / "held")


def test_a_save_that_is_being_written_when_all_ranks_end(mini: Mini, data_yaml: Path, tmp_path: Path) -> None:
    """It counts: they finish it first, as Megatron does at any other end."""
    (tmp_path / "program.py").write_text(REFUSED)
    words = ["--megaresume-data", data_yaml, "--seed", 7, "--seq-length", 32, "--vocab-size", 65, "--train-iters", 6]
    words += ["--micro-batch-size", 2, "--global-batch-size", 8, "--save", tmp_path / "save", "--save-interval", 4]
    words += ["--ckpt-format", "torch_dist", "--async-save"]
    done = mini(MINI / SCRIPTS[0], tmp_path / "refused", *words, script=str(tmp_path / "program.py"))
    assert done.status == 1 and done.output.count("something is refused") == 1, done.output[-3000:]
    choice = choose(tmp_path / "save")
    assert choice is not None and choice.iteration == 4 and choice.manifest is not None
