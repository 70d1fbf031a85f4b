"""`ReplicaSteps`: the steps of one replica of torchft's, from the quorum of each to whether it counts.

    ask       the quorum of a step is asked for; what was handed out of one that was not committed comes again
    batches   its micro-batches
    settle    the quorum is there: the samples are dealt to those who contribute, and the vote on the step begins
    commit    the step counts if torchft commits it

With torchft's asynchronous quorum, a replica that made the last step trains the first micro-batch of the next one while
the quorum is being found, dealt as the last step was:

    quorum of the step   |-- being found --|                         |-- being found --|
    first micro-batch    |---- forward ----| weight > 0: it counts   |---- forward ----| weight 0: others are there

`settle` comes when ``weight`` is read, or anything is all-reduced. If others are there than in the last step, the
micro-batch gets no weight, on any replica, and the step is dealt anew. Every replica hands out such a micro-batch then,
also one that has just joined and had nothing to guess by: a replica that all-reduces after each micro-batch needs as
many of them as any other. The vote compares that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.rank_log import RankLog
from megaresume.hosts.steps import Steps
from megaresume.hosts.torchft_dealing import Ballot, Contributors, Share, reduce_device, who_contributes
from megaresume.stream.dealing import deal_evenly
from megaresume.stream.errors import StateError, UsageError


class ReplicaSteps:
    """See above.

    Args:
        manager: torchft's.
        steps: their count.
        global_batch_size: samples of a step, of all replicas together.
        quorum_is_there: is called before a step is dealt.
    """

    #: where this process writes down what it has trained; None: nowhere.
    log: RankLog | None = None

    def __init__(
        self, manager: Any, steps: Steps, *, global_batch_size: int, quorum_is_there: Callable[[], None]
    ) -> None:
        self.manager, self.steps, self.global_batch_size = manager, steps, global_batch_size
        self._quorum_is_there = quorum_is_there
        loader = self.loader = steps.feed.loader
        #: this process within its replica, and how many there are.
        self.local, self.locals = loader.dp_rank, loader.dp_size
        #: whether a quorum was asked for, and its step is not decided.
        self.is_asked = False
        #: who trains together, and the number of that membership: see `torchft_dealing`. Empty: nobody knows.
        self.members: Sequence[Any] = ()
        self.membership = 0
        #: under which this process last began its log.
        self._logged_membership = 0
        #: of this step, once it is dealt; and of the last one that was.
        self.share: Share | None = None
        self._last_share: Share | None = None
        self.contributors: Contributors | None = None
        self._ballot: Ballot | None = None
        self._sizes: list[tuple[int, int]] = []
        #: whether others make this step than made the last one, as far as this replica knows.
        self._is_new = False
        #: of the micro-batch that was handed out last; whether it was asked for, in this step.
        self._weight, self.is_weighed = 1.0, False
        #: the micro-batch that was handed out before the quorum was there, and as whose.
        self._early: tuple[Share, Any] | None = None
        #: samples of this process in the step, and their identities, once it has voted for it.
        self._lines: tuple[Any, Any] | None = None
        #: what reads, whose share, and the sample that it reads next.
        self._reader: Iterator[Any] | None = None
        self._reads: tuple[int, int, int] | None = None

    def restart(self, membership: int) -> None:
        """Weights and position were loaded, or given by another replica, which knows this ``membership``."""
        self.stop_reading()
        self.membership, self.members = membership, ()

    # The quorum

    def ask(self) -> None:
        """The quorum of the next step is asked for."""
        self.steps.check()
        self.steps.return_all()
        self.is_asked, self.share, self._ballot, self._early, self._lines = True, None, None, None, None

    def settle(self) -> None:
        """Wait for the quorum, deal its step, and begin the vote on it; once a step."""
        if self.share is not None or not self.is_asked:
            return
        manager, size = self.manager, self.global_batch_size
        early, self._early = self._early, None  # now: our own all-reduces come here, too
        manager.wait_quorum()
        self._quorum_is_there()
        contributors = who_contributes(manager, processes=self.locals, samples=size)
        members = (manager._quorum_id, contributors.participants, *contributors.replicas)
        self._is_new, self.members = members != self.members, members
        if self._is_new and contributors.index == 0:
            self.membership = max(self.membership + 1, time.time_ns() // 1000)
        self.contributors, self.share = contributors, contributors.share(self.local)
        self._sizes = self.share.sizes(size, self.loader.micro_batch_size)
        self._ballot = self._begin_vote(contributors)
        self.steps.begin(size)
        self.is_weighed = False
        if early is not None:
            self._count_early(*early, self.share)

    def settle_early(self) -> None:
        """The same, if a micro-batch is out that was handed out before the quorum was there."""
        if self._early is not None:
            self.settle()

    def _begin_vote(self, contributors: Contributors) -> Ballot:
        return Ballot(
            self.manager,
            samples=contributors.samples_here(self.loader.micro_batch_size),
            needed=self.global_batch_size,
            position=self.steps.samples,
            membership=self.membership if contributors.index == 0 else 0,
            begins_anew=self._hands_out_one_more,
            contributes=contributors.index is not None,
            replicas=len(contributors.replicas),
            device=reduce_device(self.manager),
        )

    def _count_early(self, guess: Share, batch: Any, share: Share) -> None:
        """The micro-batch that was handed out before the quorum was there is the first one of the step, or nothing."""
        if not self._is_new and guess == share:
            self._hand_out(batch)
            return
        self._weight = 0.0
        self.stop_reading()  # it is one micro-batch ahead
        if not self._is_new:  # then other replicas may count theirs
            self.manager.report_error(
                StateError(
                    "this replica trained another share of the step than it is dealt",
                    found=f"{guess}",
                    expected=f"{share}",
                    action="none: the step is not committed, and trained again",
                )
            )

    @property
    def _can_guess(self) -> bool:
        return bool(self.share is None and self._last_share and self.members and self.manager._use_async_quorum)

    @property
    def _hands_out_one_more(self) -> bool:
        """Whether the step begins with a micro-batch without weight, on all replicas."""
        return bool(self._is_new and self.manager._use_async_quorum)

    # Micro-batches

    def batches(self) -> Iterator[Any]:
        """The micro-batches of this process in the step whose quorum was asked for."""
        if not self.is_asked:
            raise StateError(
                "no quorum was asked for this step",
                found="a `for` over the loop",
                expected="optimizer.zero_grad() of torchft's Optimizer, or manager.start_quorum(), before it",
                cause="the optimizer is not torchft's; this is a second `for` in one step; or the loop is LocalSGD's "
                "or DiLoCo's, which ask who is there after the inner steps, and are not supported",
                action="while loop.step < STEPS: optimizer.zero_grad(); for batch in loop: ...; optimizer.step()",
            )
        self.settle_early()
        self.steps.check_idle("a new `for` begins")
        is_early = self._can_guess
        if is_early:
            assert self._last_share is not None
            self._early = self._last_share, self._next(self._last_share)
            yield self._early[1]
        self.settle()
        assert self.share is not None
        self._last_share = self.share
        if self._hands_out_one_more:
            if not is_early:
                batch, self._weight = self._next(self.share), 0.0
                self.stop_reading()
                yield batch
            self._check_passed_over()
        while len(self.steps.out) < len(self._sizes):
            batch = self._next(self.share)
            self._hand_out(batch)
            yield batch

    def _check_passed_over(self) -> None:
        """A micro-batch without weight was handed out, and more of the step follow."""
        if not self.is_weighed:
            raise self.steps.fail(
                UsageError(
                    "a micro-batch of weight 0 was not weighed",
                    found="loop.weight was not read for the first micro-batch of a step that others than before make",
                    expected="(loss * loop.weight).backward(); a sum over tokens leaves out micro-batches of weight 0",
                    cause="it was dealt as in the last step, and is dealt anew: with its gradients, samples would be "
                    "trained twice",
                    action="read loop.weight for each micro-batch",
                )
            )
        self.is_weighed = False

    def _hand_out(self, batch: Any) -> None:
        """The next micro-batch of the step is this one."""
        steps, share, number = self.steps, self.share, len(self.steps.out)
        assert share is not None
        first, (all_of_it, mine) = steps.end, self._sizes[number]
        steps.feed.after(batch, first)
        is_last = number + 1 == len(self._sizes)
        steps.take(f"samples {first} to {first + all_of_it - 1}", first + all_of_it, is_last=is_last)
        steps.use()
        self._reads = share.size, share.rank or 0, steps.end
        self._weight = share.averaged * mine / self.global_batch_size
        if self.log is not None and is_last:
            self._log_vote(share)

    @property
    def weight(self) -> float:
        """Of the micro-batch that was handed out last."""
        self.settle()
        self.is_weighed = True
        return self._weight

    @property
    def ends_step(self) -> bool:
        """Whether the micro-batch that was handed out last is the last one of its step."""
        if self._early is not None:
            guess, _ = self._early
            if len(guess.sizes(self.global_batch_size, self.loader.micro_batch_size)) > 1:
                return False  # whatever the quorum is
            self.settle()
        return self.steps.is_whole

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

    # Whether the step counts

    def commit(self, should_commit: Callable[[], Any]) -> tuple[Share, int] | None:
        """The step is trained: does it count?

        Returns:
            what this process trained of it, and the membership; None if it does not count.
        """
        steps = self.steps
        self.settle_early()
        share, ballot = self.share, self._ballot
        if not self.is_asked or ballot is None or share is None:
            raise steps.fail(steps.untrained("manager.should_commit() is called without a `for` over the loop"))
        steps.check_step()
        if not self.is_weighed:
            raise UsageError(
                "the loss was not weighed",
                found="a step in which loop.weight was not read",
                expected="(loss * loop.weight).backward(), where loss is the mean over the samples of a micro-batch",
                cause="replicas train different numbers of samples, and torchft divides by the number of replicas",
                action="multiply each loss by loop.weight; a loss that is a sum of tokens: see loop.total",
            )
        size, members, membership = self.global_batch_size, self.members, ballot.decide()
        try:
            is_committed = bool(should_commit())
        finally:
            self.is_asked, self.share, self._ballot = False, None, None
        if not is_committed:
            self.members = ()  # whoever made it begins anew: some may not have heard what the others have
            steps.return_all()
            return None
        self.members = members  # also if it was healed just now: the others go on from this step
        if steps.is_idle:  # with the weights before this step just now, with the weights before this step
            steps.begin(size)
            steps.take("the step in which it joined", steps.samples + size)
            steps.use()
        steps.stepped()
        if self._lines is not None:
            self._write("step", steps.step)
        if membership is not None:
            self.membership = membership
        return share, self.membership

    # What each process writes down

    def _log_vote(self, share: Share) -> None:
        """Before this replica's last gradients are added up: whoever commits the step may be the only one to tell.
        Others wait for it only in the first step of a membership, whose number the first replica tells in its vote."""
        assert self.log is not None and self._ballot is not None
        self._lines = None
        membership = self._ballot.decide() if self._is_new else self.membership
        if share.rank is None or membership is None:
            return
        steps, loader, first = self.steps, self.loader, self.steps.samples
        plan = loader.stream.plan(first, first + self.global_batch_size)
        place = {"micro_batch_size": loader.micro_batch_size, "dp_rank": share.rank, "dp_size": share.size}
        samples = np.concatenate(deal_evenly(plan, loader.balance, **place))
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

    def _write(self, event: Literal["vote", "step"], step: int) -> None:
        assert self.log is not None and self._lines is not None
        self.log.note_planned(event, step, *self._lines)
