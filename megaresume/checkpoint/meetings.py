"""Ranks wait for each other without a collective of the training's groups, in which a missing rank would block the
rest.

`Meeting`     around work that contains third-party collectives: a rank that fails tells the others, wherever they are
`all_come`    before the first collective of a call that every rank must make
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from megaresume.checkpoint.ranks import finished, keep, pauses, rank, shared_store, torch_distributed, world_size
from megaresume.stream.errors import CheckpointError, StateError, UsageError

#: seconds to wait for the others, less than collectives do: at a meeting while no rank has failed; otherwise.
PATIENCE_AT_MEETINGS, PATIENCE = 1500.0, 300.0

#: meetings so far; the count is the same on every rank.
_meetings = itertools.count()


class FailedElsewhereError(CheckpointError):
    """Raised if another rank has failed; `Meeting.end` returns why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a rank failed."""

    words: str
    #: whether all ranks give up; otherwise they continue together, once all are at the end.
    is_final: bool


class Meeting:
    """Surrounds work that contains third-party collectives, with which no other collective may interleave: the ranks
    meet in a process group of their own, and notice there when one of them is gone. Create it on every rank.
    Collective.

    Each rank calls `gate` before those collectives, `fail` if it fails, and in any case `end`. At either of the two
    places, a rank tells the others which one it is at, so all ranks wait for each other equally often.

    Args:
        doing: what they do, for the error: "load_checkpoint()".
    """

    def __init__(self, doing: str) -> None:
        self._key, self._doing = f"megaresume/meet/{next(_meetings)}", doing
        self._failures: list[Failure] = []
        self._group = meeting_group()

    def fail(self, failure: Failure) -> None:
        """Tell the others, wherever they wait."""
        if world_size() == 1:
            self._failures.append(failure)
            return
        shared_store().set(f"{self._key}/failed/{rank()}", json.dumps([failure.words, failure.is_final]))
        shared_store().add(f"{self._key}/failures", 1)

    def gate(self) -> None:
        """Wait for all ranks, before a collective.

        Raises:
            FailedElsewhereError: another rank has failed, and will not come.
            LostRankError: another rank has ended.
        """
        self._wait(at_end=False)
        if self._failures:
            raise FailedElsewhereError("another rank has failed")

    def end(self) -> Failure | None:
        """Wait for all ranks, or for one with a final failure.

        Returns:
            a final failure, or that of the lowest rank, which is also final unless all ranks came; None if no rank
            failed.

        Raises:
            LostRankError: another rank has ended.
        """
        while (ends := self._wait(at_end=True)) is not None and not all(ends):
            pass  # the others were at a gate, and learned there that this rank has failed
        first = min(self._failures, key=lambda failure: not failure.is_final, default=None)
        return first if first is None or ends is not None else replace(first, is_final=True)

    def _wait(self, *, at_end: bool) -> list[bool] | None:
        """Whether each rank is at the end, once all have come to a place; None: a rank has failed for good, or some
        have not come for too long.
        """
        if world_size() == 1:
            return [at_end]
        if any(failure.is_final for failure in self._failures):
            return None
        try:
            return self._meet(at_end)
        except RuntimeError as error:  # the group or the store has lost a connection: the other end is gone
            with contextlib.suppress(RuntimeError):  # ranks that only wait for this one learn it from the store
                shared_store().set(f"{self._key}/lost", _first_line(error))
            raise _lost(self._doing, _first_line(error)) from error

    def _meet(self, at_end: bool) -> list[bool] | None:
        dist, torch, store, since = torch_distributed(), sys.modules["torch"], shared_store(), time.monotonic()
        places = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
        work = dist.all_gather(places, torch.tensor([int(at_end)]), group=self._group, async_op=True)
        for _ in pauses(0.1, 0.001):
            # Asked before the failures: a failing rank tells so first, and then comes.
            have_come = work.is_completed()
            if store.add(f"{self._key}/failures", 0) > len(self._failures):
                self._failures, since = self._read_failures(), time.monotonic()
            if any(failure.is_final for failure in self._failures):
                break
            if have_come:
                finished(work, places)
                return [bool(place) for place in places]
            if store.check([f"{self._key}/lost"]):
                raise _lost(self._doing, store.get(f"{self._key}/lost").decode())
            if time.monotonic() - since > (PATIENCE if self._failures else PATIENCE_AT_MEETINGS):
                break
        keep(work, (places, self._group))  # its end would wait for the others
        return None

    def _read_failures(self) -> list[Failure]:
        keys = [(number, f"{self._key}/failed/{number}") for number in range(world_size())]
        found = [(number, *json.loads(shared_store().get(key))) for number, key in keys if shared_store().check([key])]
        return [Failure(words=f"rank {number}: {words}", is_final=is_final) for number, words, is_final in found]


class LostRankError(StateError):
    """Raised if another rank has ended while this one waited for it."""


def _lost(doing: str, found: str) -> LostRankError:
    return LostRankError(
        f"a rank has ended while others waited for it in {doing}",
        found=found,
        expected=f"all {world_size()} ranks",
        cause=f"it was killed, or its node was lost; or `if rank == 0:` before {doing}",
        action="see the output of the other ranks; the run continues from its newest checkpoint",
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def meeting_group() -> Any:
    """A process group on the CPU for meetings only, in which ranks notice when one is gone. Collective."""
    return None if world_size() == 1 else torch_distributed().new_group(backend="gloo")


def all_come(doing: str, group: Any) -> None:
    """Wait for all ranks before the first collective of a call, without one of the training's groups.

    Args:
        doing: what they do, for the error: "loop.save()".
        group: from `meeting_group`.

    Raises:
        UsageError: some ranks do not come: they are in the training's next collective.
        LostRankError: a rank has ended, for example because its node was lost.
    """
    if world_size() == 1:
        return
    store, key = shared_store(), f"megaresume/come/{next(_meetings)}"
    ranks = range(world_size())
    store.set(f"{key}/{rank()}", "")
    work = torch_distributed().barrier(group=group, async_op=True)
    begin, is_said = time.monotonic(), False
    for _ in pauses(0.1, 0.001):
        if work.is_completed():
            break
        waited = time.monotonic() - begin
        if waited <= (PATIENCE if is_said else PATIENCE / 10):
            continue
        there = [number for number in ranks if store.check([f"{key}/{number}"])]
        names = f"ranks {', '.join(map(str, there))} of {len(ranks)}"
        if not is_said and rank() == there[0]:
            print(f"megaresume: WARNING: {names} wait in {doing} for the others: call it on every rank", flush=True)
        is_said = True
        if waited > PATIENCE:
            raise UsageError(
                f"{doing} was called on some ranks only",
                found=f"{names}, for {PATIENCE:.0f} s",
                expected="all ranks: each of them writes a part, and all of them decide",
                cause=f"`if rank == 0:` before {doing}",
                action=f"call {doing} on every rank",
            )
    try:
        finished(work)
    except RuntimeError as error:
        raise _lost(doing, _first_line(error)) from error
