"""`RankLoader`: one rank's micro-batches of a stream, the core of both loaders.

    which samples   `runs_of_steps`   all of the next step, a part of it, or none if the stream ends
                    `deal`            those of each micro-batch of this rank
    who reads them  `_read`           a thread, worker processes, or the consumer

A micro-batch of all ranks is a run of consecutive samples:

    samples  0 ............... W ............... 2W        W = micro_batch_size * ranks
             rank 0 | rank 1 | rank 0 | rank 1 |

so the order does not depend on ranks, workers or batch sizes. Sample numbers are computed in the consumer's process:
readers cannot change what comes next, and batches read ahead are not part of any state.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch.distributed as dist

from megaresume.batches.workers import in_thread
from megaresume.stream.batches import Balance, BatchSchedule, check_divides
from megaresume.stream.dealing import dealt_order, in_even_parts, in_parts, places_of
from megaresume.stream.errors import StateError, UsageError
from megaresume.stream.stream import Stream

log = logging.getLogger(__name__)

#: refuse: raise StreamExhausted; deal: deal out as much as gives every rank some; drop: leave it out.
AtEnd = Literal["refuse", "deal", "drop"]


@dataclass(frozen=True, slots=True)
class DataParallel:
    """A rank among the data-parallel ranks.

    Args:
        rank: this one, from 0.
        size: how many there are.
        is_default: they come from torch.distributed, or there is one process; otherwise they were given.
    """

    rank: int
    size: int
    is_default: bool

    def check(self) -> None:
        """Compare it with the current process group, which may have been made, or made again, since.

        Raises:
            StateError: samples would be trained twice, or by nobody.
        """
        now, size = _torch_rank_and_size()
        if self.is_default and (now, size) != (self.rank, self.size):
            raise StateError(
                "the loader was made for ranks that do not exist",
                found=f"rank {now} of {size} in torch.distributed",
                expected=f"rank {self.rank} of {self.size}, as when the loader was made",
                cause="the loader was made before init_process_group, or the process group was made again",
                action="make the loader after init_process_group (and again after a new one, with the state of the "
                "one before), or give it dp_rank and dp_size",
            )
        # With fewer data-parallel ranks than processes (tensor parallelism etc.), no single rank can tell.
        if _has_group() and (self.size > size or (self.size == size and self.rank != now)):
            raise StateError(
                "this is not the data-parallel rank of this process",
                found=f"dp_rank={self.rank}, dp_size={self.size}, in rank {now} of {size} of torch.distributed",
                expected=f"dp_rank={now}, if each of the {size} processes has its own samples",
                cause="dp_rank is the number on a node (LOCAL_RANK), or one that was written down",
                action="leave both out; with tensor, pipeline or context parallelism, take them from the mesh",
            )


def data_parallel(dp_rank: int | None, dp_size: int | None) -> DataParallel:
    """Find this rank among the data-parallel ranks: as given; else torch.distributed's, if it is initialised.

    Raises:
        UsageError: there is no such rank; or none was given in one of several processes that have no group yet.
    """
    is_default = dp_rank is None or dp_size is None
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if is_default and world > 1 and not _has_group():
        raise UsageError(
            "the loader is made before the process group, so it cannot know its rank",
            found=f"WORLD_SIZE={world}, and torch.distributed is not initialised",
            expected="torch.distributed initialised; otherwise every rank would train the same samples",
            action="call torch.distributed.init_process_group (or what does it: deepspeed.initialize, Accelerator()) "
            "before making the loader; or give dp_rank and dp_size",
        )
    own_rank, own_size = _torch_rank_and_size()
    rank, size = own_rank if dp_rank is None else dp_rank, own_size if dp_size is None else dp_size
    if not 0 <= rank < size:
        raise UsageError(
            "there is no such data-parallel rank",
            found=f"dp_rank={rank}, dp_size={size}",
            expected="dp_rank from 0 to dp_size - 1",
            action="leave both out: they are then torch.distributed's",
        )
    return DataParallel(rank, size, is_default)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _torch_rank_and_size() -> tuple[int, int]:
    """(rank, ranks) of the default process group; without one there is a single rank."""
    return (dist.get_rank(), dist.get_world_size()) if _has_group() else (0, 1)


def process_rank() -> tuple[int, int]:
    """(rank, ranks) of this process in torch.distributed; before that is initialised, from the launcher's variables."""
    if _has_group():
        return _torch_rank_and_size()
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)


def available(stream: Stream, first: int, wanted: int) -> int:
    """The number of samples that the stream has from ``first`` on, at most ``wanted``."""
    low, high = 0, wanted + 1  # low are available, high are not
    while high - low > 1:
        middle = wanted if high > wanted else (low + high) // 2
        if stream.reaches(first + middle):
            low = middle
        else:
            high = middle
    return low


class RankLoader:
    """The micro-batches of one data-parallel rank.

    Args:
        stream: the order.
        schedule: samples of a step, by the sample with which it begins.
        micro_batch_size: samples.
        ranks: this one among the data-parallel ranks.
        balance: how the samples of a step are dealt to the ranks; None: in stream order.
        num_workers: processes that read; 0: none.
        at_end: what to do with the last step if the stream ends within it.
    """

    #: micro-batches read ahead; without workers by a thread, unless it is 0.
    prefetch = 0
    #: the live figures, once a trainer is attached with ``metrics=``: `megaresume.checkpoint.metrics.meter.Meter`.
    meter: Any = None
    #: the word for a sample, for people.
    _unit = "samples"
    #: replicas leave and join during the run: each whole step is dealt to any number of ranks. A rank that gets nothing
    #: of a micro-batch is given its first sample, to which its trainer must give no weight.
    is_live = False

    def __init__(
        self,
        stream: Stream,
        schedule: BatchSchedule,
        *,
        micro_batch_size: int,
        ranks: DataParallel,
        balance: Balance | None,
        num_workers: int,
        at_end: AtEnd,
    ) -> None:
        self.stream, self.schedule, self.micro_batch_size = stream, schedule, micro_batch_size
        self.ranks, self.dp_rank, self.dp_size = ranks, ranks.rank, ranks.size
        self.balance, self.num_workers, self.at_end = balance, num_workers, at_end
        #: sample at which the run ends; None: no end but that of the stream.
        self.stop: int | None = None
        if not isinstance(schedule, BatchSchedule):
            raise UsageError(
                "the schedule of a loader is not a BatchSchedule",
                found=f"{schedule!r:.80}",
                expected="the samples of each step, over the run",
                action="megaresume.BatchSchedule.constant(8) for 8 samples in every step",
            )
        # Wrong sizes must fail now, on every rank, not in the middle of the ramp-up.
        for _, size in schedule.segments:
            self._check_size(size)

    def _check_size(self, size: int) -> None:
        """Raise a UsageError if the samples of a step do not divide over the ranks."""
        if not self.is_live:
            check_divides(size, micro_batch_size=self.micro_batch_size, dp_size=self.dp_size)

    def runs_of_steps(self, first: int, *, end: int | None = None, most: int = 1) -> Iterator[tuple[range, int]]:
        """The steps from a sample on, over all ranks, in groups of at most `most` samples, but at least one step.

        Args:
            first: the beginning of a step.
            end: where the last step is cut off; None: it is whole, and begins before `stop`.
            most: samples.

        Yields:
            the samples of these steps, and the size of a whole step. The last step may be short: see `at_end`.

        Raises:
            StreamExhausted: the stream ends within a step, and ``at_end`` is ``refuse``. Raised at its start, on every
                rank: one that still got batches while another ran dry would wait for it forever.
        """
        while (last := self.stop if end is None else end) is None or first < last:
            size, alike = self.schedule.steps_at(first)
            self._check_size(size)
            num = max(most // size, 1)
            wanted = size * (num if alike is None else min(num, alike))
            if last is not None:
                wanted = min(wanted, last - first if end is not None else -(-(last - first) // size) * size)
            there = available(self.stream, first, wanted)
            if there < wanted and self.at_end == "refuse":
                if there < size:
                    self.stream.check_reaches(first + min(size, wanted))
                there = wanted = there - there % size  # the error comes at the step that it belongs to
            dealt = there - there % size if self.at_end == "drop" else sum(self.parts(there, size))
            if dealt:
                yield range(first, first + dealt), size
            if dealt < wanted:
                self._say_left_over(there - dealt, size)
                return
            first += dealt

    def _say_left_over(self, left: int, step: int) -> None:
        if left and not self.dp_rank:
            why = f"a step has {step}" if self.at_end == "drop" else f"there are {self.dp_size} ranks"
            log.warning("megaresume: the last %d %s of the stream are not trained: %s", left, self._unit, why)

    def parts(self, samples: int, step: int) -> list[int]:
        """The sizes, over all ranks, of the micro-batches of the first samples of a step."""
        divide = in_even_parts if self.is_live else in_parts
        whole, short = (
            divide(size, micro_batch_size=self.micro_batch_size, dp_size=self.dp_size) if size else []
            for size in (step, samples % step)
        )
        return whole * (samples // step) + short

    def deal(self, samples: range, step: int) -> Iterator[tuple[int, Sequence[int]]]:
        """This rank's micro-batches of some steps, the last of which may be short.

        Args:
            samples: of these steps: see `runs_of_steps`.
            step: samples of a whole one.

        Yields:
            the end, in samples, of the micro-batch over all ranks; and this rank's samples.
        """
        order: Sequence[int] = samples if self.balance is None else self._balanced(samples, step)
        sizes = self.parts(len(samples), step)
        places = places_of(sizes, dp_rank=self.dp_rank, dp_size=self.dp_size)
        end = samples.start
        for size, place in zip(sizes, places, strict=True):
            end += size
            yield end, order[place.start : max(place.stop, place.start + 1)]

    def _balanced(self, samples: range, step: int) -> list[int]:
        """The samples in the order in which they are dealt, step by step."""
        layout = {"micro_batch_size": self.micro_batch_size, "dp_size": self.dp_size}
        plan = self.stream.plan(samples.start, samples.stop)
        steps = [plan.slice(first, min(first + step, plan.stop)) for first in samples[::step]]
        return list(np.concatenate([dealt_order(one, self.balance, **layout) for one in steps]).tolist())

    def _read(self) -> Iterator[Any]:
        """The batches, from whichever reader is used."""
        if self.num_workers:
            return self._from_workers()
        return in_thread(self._in_process, self.prefetch) if self.prefetch else self._in_process()

    def _from_workers(self) -> Iterator[Any]:
        """The batches that worker processes read."""
        raise NotImplementedError

    def _in_process(self) -> Iterator[Any]:
        """The batches, read on demand."""
        raise NotImplementedError
