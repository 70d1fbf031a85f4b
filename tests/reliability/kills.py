"""SIGKILL at every file operation of a save or a start, and at random moments: a job that is killed again and again.

    start -> what was restored is held against the twin -> a step or more -> save, killed at operation n
    start -> ...                                                             save, killed at operation n + 1
    ...      until a save comes to its end, because it has fewer operations
    start -> to the last step

Every start after a kill is also the beginning of the next one, on the directory that the kill left, leavings of
earlier kills included. Every fourth directory begins with a killed save, the others with a checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tests.reliability.harness import Harness, Lost, Run, newest_complete
from tests.reliability.job import Fault, Kind, Task

#: the last step; a directory is left for a new one before a chain of kills gets there.
STOP = 40
#: where a save of rank 0 has written its manifest, or is about to: what a start has to settle.
_LATE = (36, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """A kill, after which the next start went on exactly."""

    #: None: at a random moment.
    fault: Fault | None
    #: what was not done any more, as the shim calls it.
    operation: str
    #: the newest complete checkpoint before and after.
    before: int
    after: int


class Chain:
    """One run of a ZeRO stage that is stopped again and again."""

    def __init__(self, harness: Harness, zero: int, kind: Kind = "stream") -> None:
        self.harness, self.zero, self.kind = harness, zero, kind
        self.name = f"seed {harness.seed}, ZeRO {zero}, {kind}"
        self.twin = harness.twin(zero, STOP, kind=kind)
        self._begin()

    def _begin(self) -> None:
        self.directory = self.harness.new_directory()
        self.at = 0
        self.last = "nothing"
        if self.harness.random.random() < 0.75:
            self.link(None)

    def _task(self, save: int, stop: int, fault: Fault | None) -> Task:
        return Task(
            kind=self.kind,
            zero=self.zero,
            data=self.harness.data(),
            directory=self.directory,
            saves=(save,),
            stop=stop,
            fault=fault,
        )

    def link(self, fault: Fault | None, *, kill_after: float | None = None) -> Run:
        """Start, check what was restored after the last kill, go on for a step or more, save and be killed in it."""
        if self.at > STOP - 5:
            self.finish()
        save = self.at + self.harness.random.choice((1, 1, 1, 2, 3))
        run = self.harness.run(self._task(save, save + 1, fault), kill_after=kill_after)
        in_start = fault is not None and fault.while_it == "starts"
        try:
            if run.errors and not any(end < 0 for end in run.ends) and fault is None:
                raise Lost(str([error["text"] for error in run.errors]))
            if not in_start or run.restored is not None:
                self.harness.check_resumed(run, self.twin, self.at, killed_early=in_start)
        except Lost as error:
            raise Lost(f"{self.name} after {self.last}: {error}") from None
        now = newest_complete(self.directory, self.kind)
        if now not in (self.at, save):
            raise Lost(f"{self.name}, {fault}: step {now} is complete, after {self.at} and {save}")
        if run.said(0, "saved") and now != save and self.kind != "writer":  # whose save returns before it is written
            raise Lost(f"{self.name}, {fault}: the save of step {save} returned and is not complete")
        self.last = f"{fault or 'a random moment'} ({(run.operations or ('?',))[-1]})"
        self.at = now
        return run

    def finish(self) -> None:
        """The last start goes to the end of the run; then a new directory."""
        run = self.harness.run(self._task(STOP, STOP, None))
        try:
            self.harness.check_resumed(run, self.twin, self.at, complete=True)
        except Lost as error:
            raise Lost(f"{self.name}, to the end after {self.last}: {error}") from None
        shutil.rmtree(self.directory)
        self._begin()


def _kill(chain: Chain, fault: Fault) -> Kill | None:
    before = chain.at
    run = chain.link(fault)
    if not run.stopped:
        return None
    return Kill(fault=fault, operation=run.operations[-1], before=before, after=chain.at)


def in_saves(
    harness: Harness,
    zero: int,
    rank: int,
    mode: Literal["kill", "half"],
    kind: Kind = "stream",
    *,
    every: int = 1,
    while_it: Literal["saves", "writes"] = "saves",
) -> Iterator[Kill]:
    """Kill a rank at the first operation of its save, at the second, ... until it has no more; or at each so-manieth,
    from a random one on. "writes": the same in the processes that it forks for its save."""
    chain, at = Chain(harness, zero, kind), harness.random.randint(1, every)
    while (kill := _kill(chain, Fault(rank=rank, at=at, mode=mode, while_it=while_it))) is not None:
        yield kill
        at += every
    chain.finish()


def in_starts(harness: Harness, zero: int, mode: Literal["kill", "half"], rounds: int) -> Iterator[Kill]:
    """Kill a save anywhere, then the start after it at its first operation, its second, ... until it has no more."""
    chain = Chain(harness, zero)
    for _ in range(rounds):
        fault = Fault(rank=0, at=harness.random.randint(*_LATE))
        if (kill := _kill(chain, fault)) is not None:
            yield kill
        at = 1
        while (kill := _kill(chain, Fault(rank=0, at=at, mode=mode, while_it="starts"))) is not None:
            yield kill
            at += 1
    chain.finish()


def random_moments(
    harness: Harness, zero: int, number: int, kind: Kind = "stream", *, longest: float = 0.08
) -> Iterator[Kill]:
    """Kill all ranks together, so many seconds after a save has begun at most."""
    chain = Chain(harness, zero, kind)
    while number > 0:
        before = chain.at
        run = chain.link(None, kill_after=harness.random.uniform(0.0, longest))
        if -9 in run.ends:
            number -= 1
            yield Kill(fault=None, operation="", before=before, after=chain.at)
    chain.finish()
