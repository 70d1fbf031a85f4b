"""`DealtSteps`: what one replica reads, trains and records of the steps that are dealt to it.

`torchft_steps` determines when they are dealt, and to whom.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import xxhash

from megaresume.batches.agreement import order_of
from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.records.rank_log import RankLog
from megaresume.hosts.steps import Steps
from megaresume.hosts.torchft_dealing import Contributors, Rule, Share, who_contributes
from megaresume.stream.dealing import deal
from megaresume.stream.errors import StateError


class DealtSteps:
    """The steps that are dealt to one replica.

    Args:
        manager: torchft's.
        steps: the count.
        samples: per step, over all replicas.
        step_begins: called between two steps, before anything of the next one.
        quorum_is_there: called after each quorum, before anything is dealt or voted on.
    """

    #: where this process records what it has trained; None: nowhere.
    log: RankLog | None = None

    def __init__(
        self,
        manager: Any,
        steps: Steps,
        *,
        samples: int,
        step_begins: Callable[[], None],
        quorum_is_there: Callable[[], None],
    ) -> None:
        self.manager, self.steps, self.samples = manager, steps, samples
        self._step_begins, self._quorum_is_there = step_begins, quorum_is_there
        loader = self.loader = steps.feed.loader
        #: number of this process within its replica, and of all its processes.
        self.local, self.locals = loader.dp_rank, loader.dp_size
        #: as created with the loader.
        self._micro_batch_size = loader.micro_batch_size
        self._rule: Rule | None = None
        #: who trains together, and the number of that membership: see `torchft_dealing`. Empty: unknown.
        self.members: Sequence[Any] = ()
        self.membership = 0
        #: the membership under which this process last began its log.
        self._logged_membership = 0
        #: the share in this step, once it is dealt.
        self.share: Share | None = None
        #: the contributors in the last quorum.
        self.contributors: Contributors | None = None
        #: samples in each micro-batch of this step: over all processes, and in this one.
        self._sizes: list[tuple[int, int]] = []
        #: weight of the last micro-batch handed out; whether it was read in this step.
        self._weight, self.is_weighed = 1.0, False
        #: samples of this process in the step, and their identities, once it has voted for it.
        self._lines: tuple[Any, Any] | None = None
        #: the current reader, the share that it reads, and the sample that it reads next.
        self._reader: Iterator[Any] | None = None
        self._reads: tuple[int, int, int] | None = None

    def restart(self, membership: int) -> None:
        """Start again after weights and position were loaded, or sent by another replica with this ``membership``."""
        self.stop_reading()
        self._rule = None  # what is left out of the data may have changed
        self.membership, self.members = membership, ()

    @property
    def rule(self) -> Rule:
        """The rule by which steps are dealt out here."""
        if self._rule is None:
            parts = {
                "batch_size": self._micro_batch_size,
                "samples of a step": self.samples,
                "balance": self.loader.balance,
                "processes": self.locals,
                "hash of the data, skips and stages": xxhash.xxh3_64_hexdigest(order_of(self.loader.stream).encode()),
            }
            self._rule = Rule({name: str(part) for name, part in parts.items()})
        return self._rule

    # What torchft calls

    def before_quorum(self) -> None:
        """Called before a quorum is requested."""
        raise NotImplementedError

    def after_quorum(self) -> None:
        """Called after it was requested; the synchronous quorum is then known."""

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> None:
        """Called before a tensor is all-reduced, with the arguments of `allreduce`."""
        raise NotImplementedError

    def commit(self, should_commit: Callable[[], Any]) -> tuple[Share, int] | None:
        """Decide whether a trained step counts.

        Returns:
            this process's share of it, and the membership; None if it does not count.
        """
        raise NotImplementedError

    # Who trains together

    def _see_members(self, samples: int) -> tuple[Contributors, tuple[Any, ...], int]:
        """Find out who is in the quorum, for a step of this many samples.

        Returns:
            the result of `who_contributes`; the value for ``members``; and the number for ``membership``. If others
            train together than before, the first of them chooses a new one.
        """
        manager = self.manager
        contributors = self.contributors = who_contributes(manager, processes=self.locals, samples=samples)
        members = (manager._quorum_id, contributors.participants, *contributors.replicas)
        if members == self.members or contributors.index != 0:
            return contributors, members, self.membership
        return contributors, members, max(self.membership + 1, time.time_ns() // 1000)

    # What the loop calls

    def batches(self) -> Iterator[Any]:
        """The micro-batches of this process in the next step."""
        raise NotImplementedError

    @property
    def weight(self) -> float:
        """The weight of the last micro-batch handed out."""
        self.is_weighed = True
        return self._weight

    @property
    def ends_step(self) -> bool:
        """Whether an optimizer step follows the last micro-batch handed out."""
        raise NotImplementedError

    def total(self, number: float) -> float:
        """The sum of a number over all processes that contribute to the step."""
        raise NotImplementedError

    # Micro-batches

    def _take(self, batch: Any, share: Share) -> int:
        """Note that the next micro-batch of the step is handed out. Returns this process's number of samples in it."""
        steps, number = self.steps, len(self.steps.out)
        first, (all_of_it, mine) = steps.end, self._sizes[number]
        steps.feed.after(batch, first)
        is_last = number + 1 == len(self._sizes)
        steps.take(f"samples {first} to {first + all_of_it - 1}", first + all_of_it, is_last=is_last)
        steps.use()
        self._reads = share.size, share.rank or 0, steps.end
        return mine

    def _next(self, share: Share) -> Any:
        """The next micro-batch. The reader continues while the share is the same."""
        loader, feed, end = self.loader, self.steps.feed, self.steps.end
        reads = share.size, share.rank or 0, end
        if self._reader is None or self._reads != reads:
            self.stop_reading()
            loader.dp_size, loader.dp_rank = share.size, share.rank or 0
            if isinstance(loader, DataLoader):
                loader.rewind(end)
            self._reader = feed.read(end)
        try:
            batch = next(self._reader)
        except StopIteration:
            if not feed.has(end):
                raise StateError(
                    "the data has ended",
                    found=f"a step after sample {end}",
                    expected="no more steps",
                    action="while not loop.is_over and loop.step < STEPS: ...",
                ) from None
            self._reader = feed.read(end)  # the next epoch
            batch = next(self._reader)
        return batch

    def stop_reading(self) -> None:
        """End reading ahead."""
        reader, self._reader = self._reader, None
        if isinstance(reader, Generator):
            reader.close()

    # What each process writes down

    def log_vote(self, share: Share, membership: int | None) -> None:
        """Record that this replica votes for the step. Before its last gradients, or its weights, are added up, as only
        one replica may be left to record a commit.

        Args:
            share: that it has trained.
            membership: of those who have trained it; None: the step must not be committed.
        """
        self._lines = None
        if self.log is None or share.rank is None or membership is None:
            return
        steps, loader, first = self.steps, self.loader, self.steps.samples
        plan = loader.stream.plan(first, first + self.samples)
        place = {"micro_batch_size": loader.micro_batch_size, "dp_rank": share.rank, "dp_size": share.size}
        samples = np.concatenate(deal(plan, loader.balance, evenly=True, **place))
        if not len(samples):
            return
        if membership != self._logged_membership:
            self._logged_membership, digest = membership, steps.feed.snapshot(first).digest
            layout = {"dp": share.size, "dp_rank": share.rank, "micro_batch_size": loader.micro_batch_size, "pad_id": 0}
            self.log.start(
                step=steps.step, samples=first, digest=digest, balance=loader.balance, launch=membership, **layout
            )
        self._lines = samples, plan.hashes[samples - first]
        self._write("vote", steps.step + 1)

    def _count_step(self, joined: str) -> None:
        """Count a committed step, and record what this process has trained of it.

        Args:
            joined: name of the step in the log if this process got none of its samples, and has the weights of those
                who trained it.
        """
        steps = self.steps
        if steps.is_idle:
            steps.begin(self.samples)
            steps.take(joined, steps.samples + self.samples)
            steps.use()
        steps.stepped()
        if self._lines is not None:
            self._write("step", steps.step)

    def _write(self, event: Literal["vote", "step"], step: int) -> None:
        assert self.log is not None and self._lines is not None
        self.log.note_planned(event, step, *self._lines)
