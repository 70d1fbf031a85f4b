"""`DealtSteps`: what one replica reads, trains and writes down of the steps that are dealt to it.

`torchft_steps` says when they are dealt, and to whom.
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
    """See above.

    Args:
        manager: torchft's.
        steps: their count.
        samples: of a step, of all replicas together.
        step_begins: is called between two steps, before anything of the next one.
        quorum_is_there: is called after each quorum, before anything is dealt or voted on.
    """

    #: where this process writes down what it has trained; None: nowhere.
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
        #: this process within its replica, and how many there are.
        self.local, self.locals = loader.dp_rank, loader.dp_size
        #: as the loader was made.
        self._micro_batch_size = loader.micro_batch_size
        self._rule: Rule | None = None
        #: who trains together, and the number of that membership: see `torchft_dealing`. Empty: nobody knows.
        self.members: Sequence[Any] = ()
        self.membership = 0
        #: under which this process last began its log.
        self._logged_membership = 0
        #: of this step, once it is dealt.
        self.share: Share | None = None
        #: of the last quorum.
        self.contributors: Contributors | None = None
        #: samples in each micro-batch of this step: of all processes together, and of this one.
        self._sizes: list[tuple[int, int]] = []
        #: of the micro-batch that was handed out last; whether it was asked for, in this step.
        self._weight, self.is_weighed = 1.0, False
        #: samples of this process in the step, and their identities, once it has voted for it.
        self._lines: tuple[Any, Any] | None = None
        #: what reads, whose share, and the sample that it reads next.
        self._reader: Iterator[Any] | None = None
        self._reads: tuple[int, int, int] | None = None

    def restart(self, membership: int) -> None:
        """Weights and position were loaded, or given by another replica, which knows this ``membership``."""
        self.stop_reading()
        self._rule = None  # what is left out may have been told
        self.membership, self.members = membership, ()

    @property
    def rule(self) -> Rule:
        """By which steps are dealt out here."""
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
        """Before a quorum is asked for."""
        raise NotImplementedError

    def after_quorum(self) -> None:
        """After it was asked for; with the synchronous quorum, it is there."""

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> None:
        """Before a tensor is all-reduced; the arguments are those of `allreduce`."""
        raise NotImplementedError

    def commit(self, should_commit: Callable[[], Any]) -> tuple[Share, int] | None:
        """The step is trained: does it count?

        Returns:
            what this process trained of it, and the membership; None if it does not count.
        """
        raise NotImplementedError

    # Who trains together

    def _see_members(self, samples: int) -> tuple[Contributors, tuple[Any, ...], int]:
        """Who is in the quorum, for a step of so many samples.

        Returns:
            what `who_contributes` says; its value for ``members``; and its number for ``membership``. If others train
            together than before, the first of them makes a new one up.
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
        """Of the micro-batch that was handed out last."""
        self.is_weighed = True
        return self._weight

    @property
    def ends_step(self) -> bool:
        """Whether an optimizer step follows the micro-batch that was handed out last."""
        raise NotImplementedError

    def total(self, number: float) -> float:
        """The sum of a number of each process that contributes to the step."""
        raise NotImplementedError

    # Micro-batches

    def _take(self, batch: Any, share: Share) -> int:
        """The next micro-batch of the step is handed out. Returns how many samples this process has in it."""
        steps, number = self.steps, len(self.steps.out)
        first, (all_of_it, mine) = steps.end, self._sizes[number]
        steps.feed.after(batch, first)
        is_last = number + 1 == len(self._sizes)
        steps.take(f"samples {first} to {first + all_of_it - 1}", first + all_of_it, is_last=is_last)
        steps.use()
        self._reads = share.size, share.rank or 0, steps.end
        return mine

    def _next(self, share: Share) -> Any:
        """The next micro-batch. Whoever reads ahead goes on as long as the share is the same."""
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
        """End whoever reads ahead."""
        reader, self._reader = self._reader, None
        if isinstance(reader, Generator):
            reader.close()

    # What each process writes down

    def log_vote(self, share: Share, membership: int | None) -> None:
        """This replica votes for the step. Before its last gradients, or its weights, are added up: whoever commits the
        step may be the only one to tell.

        Args:
            share: that it has trained.
            membership: of those who have trained it; None: the step is not to be committed.
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
        """The step is committed: count it, and write down what this process has trained of it.

        Args:
            joined: what it is called if this process was handed out nothing of it, and has the weights of those who
                have trained it.
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
