"""SIGKILL at every file operation among the copies of a run with two storages; then the local one is there, or lost.

start -> steps -> save, committed locally -> copied; killed at operation n below the copies, from start to end
the local storage stays, or is removed
start -> held against the twin: the newest of both; the newest copy; or a refusal, if no copy is whole
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tests.reliability.harness import Harness, Lost, Outcome, Run, newest_complete, refusal
from tests.reliability.job import WORLD_SIZE, Fault, Task

#: the first one: every kill has a run of its own. The others: a run with a whole copy goes from kill to kill.
Kind = Literal["first copy, lost", "kept", "lost"]
KINDS: tuple[Kind, ...] = ("first copy, lost", "kept", "lost")
STOP = 40


class _Run:
    """A run with two storages."""

    def __init__(self, harness: Harness, zero: int) -> None:
        self.harness, self.zero = harness, zero
        self.twin = harness.twin(zero, STOP)
        self.local, self.shared = harness.new_directory(), harness.new_directory()
        self.shared.mkdir()

    def job(self, *, save: int | None, stop: int, fault: Fault | None = None, output: Path | None = None) -> Run:
        task = Task(
            zero=self.zero,
            data=self.harness.data(),
            directory=self.local,
            stage_to=self.shared,
            saves=() if save is None else (save,),
            stop=stop,
            fault=fault,
        )
        return self.harness.run(task, output=output)

    @property
    def newest(self) -> int:
        return max(newest_complete(self.local), newest_complete(self.shared))

    def lose(self) -> None:
        shutil.rmtree(self.local, ignore_errors=True)

    def tells_of_checkpoints(self) -> bool:
        """Whether there is anything among the copies that only a committed checkpoint leaves there."""
        ledger = self.shared / "megaresume" / "ledger.jsonl"
        said = ledger.exists() and b'"kind": "checkpoint"' in ledger.read_bytes()
        return said or any(self.shared.glob("global_step*")) or any(self.shared.glob("megaresume/step_*"))

    def remove(self) -> None:
        self.lose()
        shutil.rmtree(self.shared)


def in_copies(harness: Harness, zero: int, kind: Kind, *, every: int = 1) -> Iterator[Outcome]:
    """Kill rank 0 at the first operation among the copies, and so on, until it has no more.

    Args:
        harness: makes the jobs.
        zero: ZeRO stage.
        kind: what happens between the kill and the next start.
        every: take each so-manieth operation, from a random one on.
    """
    at = harness.random.randint(1, every)
    is_first = kind == "first copy, lost"
    run, killed = _begin(harness, zero, has_copy=not is_first), True
    while killed:
        before = run.newest
        fault = Fault(rank=0, at=at, while_it="copies")
        done = run.job(save=before + 1, stop=before + 1, fault=fault)
        killed = done.stopped
        try:
            _check(run, done, before)
            if kind != "kept":
                run.lose()
            if is_first:
                yield _next_start(run)
            else:  # the next job that is killed is also the next start
                if not run.newest:
                    raise Lost("the copy that was there is gone")
                yield "resumed exactly"
        except Lost as error:
            operation = (done.operations or ("?",))[-1]
            raise Lost(f"seed {harness.seed}, ZeRO {zero}, {kind}, {fault} ({operation}): {error}") from None
        if is_first or run.newest > STOP - 3:
            run.remove()
            run = _begin(harness, zero, has_copy=not is_first)
        at += every
    run.harness.check_resumed(run.job(save=None, stop=STOP), run.twin, run.newest, complete=True)
    run.remove()


def _begin(harness: Harness, zero: int, *, has_copy: bool) -> _Run:
    run = _Run(harness, zero)
    if has_copy:
        _check(run, run.job(save=1, stop=1), 0)
    return run


def _check(run: _Run, done: Run, before: int) -> None:
    """Hold the job that was killed against its twin, as far as it got."""
    if any(error for error in done.errors if error["what"] == "refused"):
        raise Lost(f"it refused: {done.errors[0]['text']}")
    if not done.stopped or all(done.said(rank, "restored") for rank in range(WORLD_SIZE)):
        run.harness.check_resumed(done, run.twin, before)
    if not done.stopped and newest_complete(run.shared) != before + 1:
        raise Lost(f"it came to its end, and step {before + 1} is not copied")


def _next_start(run: _Run) -> Outcome:
    """A start that saves nothing."""
    newest, output = run.newest, run.shared.with_name(f"{run.shared.name}.out")
    is_empty = not run.local.exists()
    is_lost = not newest and is_empty and run.tells_of_checkpoints()
    knows = (run.shared / "megaresume" / "ledger.jsonl").exists()
    started = run.job(save=None, stop=newest + 1, output=output)
    said = output.read_text()
    output.unlink()
    if is_lost:
        if (words := refusal(started)) is None or "the run has saved checkpoints" not in words:
            raise Lost(f"it began at step {started.restored}, and the copies tell of checkpoints: {words}")
        shutil.rmtree(run.shared)
        run.shared.mkdir()
        return "refused correctly"
    run.harness.check_resumed(started, run.twin, newest, complete=True)
    if not newest and is_empty and knows and "it begins at step 0" not in said:
        raise Lost("it began at step 0 without a word")
    return "resumed exactly"
