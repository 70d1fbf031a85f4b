"""Two ranks and the directory that they save to: held by others, lost, not shared; and clocks that differ.

``python starting.py DATA ROOT``, as Slurm's job 7.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from toy import DATA, ROOT, engine_of, error_of, finish, result, start, train

import torch.distributed as dist  # isort: skip

import megaresume
from megaresume.checkpoint.lock import lock, shared
from megaresume.checkpoint.ranks import on_rank_0
from megaresume.checkpoint.stopping import StopConditions

#: holds a root, as a process of another job.
OTHER = """
import sys
from megaresume.checkpoint.lock import lock
lock.RENEW_SECONDS = 0.1
lock.take(sys.argv[1])
print("TAKEN", flush=True)
sys.stdin.read()  # until it is killed, or nobody is left who would do it
"""


def other_job(root: Path, **env: str) -> subprocess.Popen[str] | None:
    """On rank 0: a job that holds the root, once it does."""
    job: list[subprocess.Popen[str]] = []

    def begin() -> None:
        command, pipe = [sys.executable, "-c", OTHER, str(root)], subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | env)
        assert process.stdout is not None
        while process.stdout.readline() != "TAKEN\n":
            assert process.poll() is None
        job.append(process)

    on_rank_0(begin)
    return job[0] if job else None


def end(job: subprocess.Popen[str] | None) -> None:
    def kill() -> None:
        assert job is not None
        job.send_signal(signal.SIGKILL)
        job.wait()

    on_rank_0(kill)


def attach(engine: Any, save_dir: Path | None, **options: Any) -> Any:
    return megaresume.attach(
        engine,
        DATA,
        checkpoints=megaresume.Checkpoints(save_dir=save_dir),
        loader_options=megaresume.LoaderOptions(prefetch=0),
        **options,
    )


def held_by_another(engine: Any) -> None:
    job = other_job(ROOT / "held", SLURM_JOB_ID="6")
    refused = error_of(lambda: attach(engine, ROOT / "held"))
    data = attach(engine, None)
    train(engine, data, engine.global_steps + 1)
    first_save = error_of(lambda: engine.save_checkpoint(str(ROOT / "held")))
    there = sorted(path.name for path in (ROOT / "held").iterdir())
    end(job)
    engine.save_checkpoint(str(ROOT / "held"))
    result("held", [refused, first_save, there, (ROOT / "held" / "latest").read_text()])


def lost_to_another(engine: Any) -> None:
    """Slurm has begun this job anew, and its node is not dead after all."""
    root = ROOT / "lost"
    data = attach(engine, root)
    train(engine, data, engine.global_steps + 1)
    engine.save_checkpoint(str(root))
    saved = (root / "latest").read_text()
    job = other_job(root, SLURM_RESTART_COUNT="1")
    train(engine, data, engine.global_steps + 1)
    lost = error_of(lambda: engine.save_checkpoint(str(root)))
    records = sorted(path.name for path in (root / "megaresume").glob("step*"))
    end(job)
    result("lost", [lost, saved == (root / "latest").read_text(), records, saved])


def not_shared(engine: Any) -> None:
    own = ROOT / f"disk_of_rank_{dist.get_rank()}"
    own.mkdir()
    shared.SEEN_WITHIN_SECONDS = 0.3
    named = error_of(lambda: attach(engine, own))
    data = attach(engine, None)
    train(engine, data, engine.global_steps + 1)
    unknown = error_of(lambda: engine.save_checkpoint(str(own)))
    tags = [path.name for path in own.glob("global_step*")]
    on_rank_0(lambda: bool(lock.take(own)))  # it was let go of
    result("not_shared", [named, unknown, tags])


def lagging(engine: Any) -> None:
    """What rank 0 writes comes to rank 1 a second later, as through the cache of a shared filesystem."""
    shared.SEEN_WITHIN_SECONDS = 30.0
    own = ROOT / f"cache_of_rank_{dist.get_rank()}"
    over = threading.Event()

    def mirror() -> None:
        while not over.wait(0.05):
            for path in (ROOT / "cache_of_rank_0" / "megaresume").glob(".seen*"):
                time.sleep(1.0)
                (own / "megaresume").mkdir(parents=True, exist_ok=True)
                (own / "megaresume" / path.name).touch()

    if dist.get_rank() == 1:
        threading.Thread(target=mirror, daemon=True).start()
    began = time.monotonic()
    attach(engine, own).close()
    took = time.monotonic() - began
    over.set()
    on_rank_0(lambda: lock.release(own))
    result("lagging", took)


def _nothing() -> None:
    """How to save, where nothing is saved."""


def clocks(engine: Any) -> None:
    """Rank 1's is a minute and a half ahead; or it is only held up between the two gathers, once."""
    real = time.time
    if dist.get_rank() == 1:
        time.time = lambda: real() + 90.0
    os.environ["MEGARESUME_JOB_END_TIME"] = str(int(real()) + 3600)
    needed = error_of(lambda: attach(engine, None, stop=StopConditions(before_end=5, signals=()), on_stop=_nothing))
    attach(engine, None, stop=StopConditions(after_minutes=60, signals=()), on_stop=_nothing)
    held_up = iter([7.0])
    time.time = lambda: real() + (next(held_up, 0.0) if dist.get_rank() == 1 else 0.0)
    passed = error_of(lambda: attach(engine, None, stop=StopConditions(before_end=5, signals=()), on_stop=_nothing))
    time.time = real
    result("clocks", [needed, passed])


start()
for scenario in (held_by_another, lost_to_another, not_shared, lagging, clocks):
    print(f"\nBEGIN {scenario.__name__}", flush=True)
    scenario(engine_of())
finish()
