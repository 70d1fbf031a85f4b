"""Saves by `megaresume.checkpoint` alone, recorded: as a job makes them, without the job. For thousands of power cuts.

    python -m tests.reliability.saves SCENARIO DIRECTORY LOG [forgetful]        with `shim.environment`

DIRECTORY is empty; the checkpoints are in `ROOT` there. Forgetful: no model file is forced to the disk, whatever the
code under test does; a power cut must then be noticed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.reliability import shim
from tests.reliability.recording import Recording, read

__all__ = ["ROOT", "SCENARIOS", "record"]

#: of the checkpoints, below the directory that is recorded: whether it is forced to the disk itself counts, too.
ROOT: Final = "checkpoints"
#: bytes of the model files: more than a block, and not a number of blocks.
SIZES: Final = {"mp_rank_00_model_states.pt": 9_000, "zero_pp_rank_0_mp_rank_00_optim_states.pt": 13_500}
#: operations of a save at which it is killed.
KILLED_AT: Final = (5, 20, 26, 34, 47)


def _save(root: Path, iteration: int, rng: random.Random, keep: int | None) -> None:
    from megaresume.checkpoint.save.commit import begin_save, commit_save
    from megaresume.checkpoint.save.retention import Retention, make_room
    from tests.checkpoint.conftest import make_state
    from tests.checkpoint.durability import make_durable

    state = make_state(iteration * 8, salt=rng.randrange(1000))
    make_room(root, iteration, f"global_step{iteration}")
    pending = begin_save(root, tag=f"global_step{iteration}", iteration=iteration, state=state)
    pending.tag_dir.mkdir(exist_ok=True)
    for name, size in SIZES.items():
        with open(pending.tag_dir / name, "wb", buffering=4096) as file:
            for _ in range(3):
                file.write(rng.randbytes(size // 3))
    make_durable(root, commit_save(pending, expected_files=SIZES).manifest, retention=Retention(keep_last=keep))
    _end_threads()


def _end_threads() -> None:
    """Old checkpoints are deleted by one."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()


def _start(root: Path) -> None:
    from megaresume.checkpoint.load.choose import choose
    from megaresume.checkpoint.lock.lock import take
    from megaresume.checkpoint.save.forcing import not_durable
    from megaresume.checkpoint.save.retention import put_back
    from megaresume.checkpoint.starts import record_start
    from tests.checkpoint.conftest import make_state
    from tests.checkpoint.durability import make_durable

    take(root)
    put_back(root)
    choice = choose(root)
    if choice is None:
        record_start(root, iteration=0, state=make_state(0))
    else:
        assert choice.iteration is not None and choice.state is not None
        record_start(root, iteration=choice.iteration, state=choice.state, choice=choice)
    for manifest in not_durable(root):
        make_durable(root, manifest)


def one_kept(root: Path, rng: random.Random) -> None:
    """Each checkpoint makes room for the next, which is all that there is then."""
    _start(root)
    for iteration in (10, 20, 30, 40):
        _save(root, iteration, rng, 1)


def same_step_again(root: Path, rng: random.Random) -> None:
    """A step is saved a second time after a start from the one before, with other data."""
    _start(root)
    for iteration in (10, 20):
        _save(root, iteration, rng, None)
    _start(root)
    for iteration in (20, 30):
        _save(root, iteration, rng, 2)


def copies(root: Path, rng: random.Random) -> None:
    """Local checkpoints are copied to `ROOT`; what becomes of the local ones is of no account."""
    from megaresume.checkpoint.copies.stager import Stager
    from megaresume.checkpoint.lock.lock import release, take
    from megaresume.checkpoint.save.retention import Retention

    local = root.parent / "local"
    _start(local)
    take(root)
    stager = Stager(local, root, Retention(keep_last=1))
    stager.start()
    for iteration in (10, 20, 30):
        _save(local, iteration, rng, None)
        stager.submit(iteration, f"global_step{iteration}")
    stager.close()
    release(local)
    _end_threads()


def killed_saves(root: Path, rng: random.Random) -> None:
    """Jobs that are killed in a save, early to late (today: in the marker, before the state, after the manifest, after
    the first pointer, in the ledger), and the jobs that start after them.
    """
    _job(root, [10], rng)
    for iteration, at in zip((20, 30, 40, 50, 60), KILLED_AT, strict=True):
        _job(root, [iteration], rng, kill_at=at)
        _job(root, [iteration + 5], rng)


def _job(root: Path, saves: list[int], rng: random.Random, *, kill_at: int | None = None) -> None:
    """On a node of its own: start, save, end, or be killed at an operation of the save, as `killer` counts them."""
    from megaresume.checkpoint import system
    from tests.checkpoint.killer import count_operations

    rng = random.Random(rng.random())
    if (child := os.fork()) != 0:
        _, status = os.waitpid(child, 0)
        assert status == (0 if kill_at is None else signal.SIGKILL), f"{saves}, killed at {kill_at}: {status}"
        return
    status = 1
    try:
        system.boot_id = lambda: f"node of process {os.getpid()}"
        _start(root)
        if kill_at is not None:
            count_operations(kill_at, False)
        for iteration in saves:
            _save(root, iteration, rng, 1)
        status = 0
    finally:
        os._exit(status)


SCENARIOS: Final[dict[str, Callable[[Path, random.Random], None]]] = {
    function.__name__.replace("_", " "): function for function in (one_kept, same_step_again, copies, killed_saves)
}


def record(scenario: str, work: Path, *, forgetful: bool = False) -> Recording:
    """Make the saves of one of `SCENARIOS` in a process of its own.

    Args:
        scenario: which.
        work: a directory, on a file system that syncs quickly.
        forgetful: without forcing model files to the disk.
    """
    directory, log = work / "recorded", work / "log"
    directory.mkdir(parents=True)
    more = ["forgetful"] if forgetful else []
    command = [sys.executable, "-m", "tests.reliability.saves", scenario, str(directory), str(log), *more]
    done = subprocess.run(
        command,
        env=os.environ | shim.environment(),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the saves failed: {done.stdout}{done.stderr}")
    return read(log, directory)


def _forget() -> None:
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def forced(descriptor: int, real: Callable[[int], None] = real) -> None:
            if "/global_step" not in os.readlink(f"/proc/self/fd/{descriptor}"):
                real(descriptor)

        setattr(os, name, forced)


def main(scenario: str, directory: Path, log: Path, *more: str) -> None:
    """In the process that is recorded."""
    from megaresume.checkpoint.lock.lock import release

    if more:
        _forget()
    recorder = shim.Shim()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with recorder.armed(directory, mode="record", log=descriptor):
        SCENARIOS[scenario](directory / ROOT, random.Random(scenario))
        release(directory / ROOT)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
