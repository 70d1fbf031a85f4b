"""Runs a scenario again and again, each time in a child that kills itself at another file operation.

    python -m tests.checkpoint.killer SCENARIO BASE WORK

Every attempt works on a fresh copy of BASE, ``WORK/<n>-<how>``. ``how`` is ``before`` (SIGKILL instead of operation
n) or ``half`` (operation n is a write: half of it, then SIGKILL). Prints the attempts, one name a line, and as the
last one the run that nothing killed. Single-threaded, so that forking is safe.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.save.commit import begin_save, commit_save
from megaresume.checkpoint.save.forcing import not_durable
from megaresume.checkpoint.save.retention import make_room, put_back
from megaresume.checkpoint.starts import record_start
from tests.checkpoint.conftest import MODEL, OPTIM, make_state
from tests.checkpoint.durability import make_durable

#: what the code under test, and the model files below, do to the disk.
OPERATIONS = ("open", "write", "fsync", "close", "replace", "rename", "unlink", "mkdir")


def count_operations(kill_at: int, half: bool) -> None:
    """From now on, die at the given operation."""
    done = 0

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done == kill_at:
                if half and name == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return operation

    for name in OPERATIONS:
        setattr(os, name, wrap(name, getattr(os, name)))


def write_model(tag_dir: Path, content: bytes) -> None:
    if not tag_dir.is_dir():
        os.mkdir(tag_dir)
    for name in (MODEL, OPTIM):
        descriptor = os.open(tag_dir / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(descriptor, content * 64)
        os.close(descriptor)


def save(root: Path, iteration: int, salt: int) -> None:
    state = make_state(iteration * 8, salt=salt)
    make_room(root, iteration, f"global_step{iteration}")
    pending = begin_save(root, tag=f"global_step{iteration}", iteration=iteration, state=state)
    write_model(pending.tag_dir, state.digest.encode())
    commit = commit_save(pending, expected_files=[MODEL, OPTIM])
    make_durable(root, commit.manifest)


def next_step(root: Path) -> None:
    """A new checkpoint after others."""
    save(root, 40, 0)


def same_step_other_data(root: Path) -> None:
    """A step that is there already is saved again, by fewer ranks."""
    save(root, 30, 1)


def start(root: Path) -> None:
    """A start: it settles what the killed run before it left."""
    put_back(root)
    choice = choose(root)
    assert choice is not None
    assert choice.iteration is not None
    assert choice.state is not None
    record_start(root, iteration=choice.iteration, state=choice.state, choice=choice)
    for manifest in not_durable(root):
        make_durable(root, manifest)


SCENARIOS = {function.__name__: function for function in (next_step, same_step_other_data, start)}


def attempt(scenario: Callable[[Path], None], root: Path, kill_at: int, half: bool) -> bool:
    """Returns whether the child was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            count_operations(kill_at, half)
            scenario(root)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    if os.WEXITSTATUS(status) != 0:
        raise SystemExit(f"{root}: the child failed")
    return False


def main() -> None:
    scenario, base, work = SCENARIOS[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3])
    for half in (False, True):
        kill_at, killed = 0, True
        while killed:
            kill_at += 1
            root = work / f"{kill_at}-{'half' if half else 'before'}"
            shutil.copytree(base, root)
            killed = attempt(scenario, root, kill_at, half)
            print(root.name, flush=True)


if __name__ == "__main__":
    main()
