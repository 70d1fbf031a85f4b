"""`ReplicaSteps`: the steps of one replica of torchft's, from quorum to commit.

    before_quorum   the quorum of a step is requested; what was handed out of an uncommitted one comes again
    batches         its micro-batches
    settle          the quorum is known: the samples are dealt to the contributors, and the vote on the step begins
    commit          the step counts if torchft commits it

With torchft's asynchronous quorum, a replica that did the last step trains the first micro-batch of the next one while
the quorum is being formed, dealt as in the last step:

    quorum of the step   |-- being formed --|                        |-- being formed --|
    first micro-batch    |---- forward ----| weight > 0: it counts   |---- forward ----| weight 0: the members changed

`settle` is called when ``weight`` is read, or anything is all-reduced. If the members have changed since the last step,
the micro-batch gets no weight, on any replica, and the step is dealt anew. Every replica then hands out such a
micro-batch, even one that has just joined and could not guess: a replica that all-reduces after each micro-batch must
have as many as any other. The vote compares that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from megaresume.hosts.torchft_dealing import Ballot, Contributors, Share, reduce_device
from megaresume.hosts.torchft_dealt import DealtSteps
from megaresume.stream.errors import StateError, UsageError


class ReplicaSteps(DealtSteps):
    """The steps of one replica, see `DealtSteps`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: whether a quorum was requested, and its step is not decided.
        self.is_asked = False
        #: the share in the last step that was dealt.
        self._last_share: Share | None = None
        self._ballot: Ballot | None = None
        #: whether the members have changed since the last step, as far as this replica knows.
        self._is_new = False
        #: the micro-batch that was handed out before the quorum was known, and for which share.
        self._early: tuple[Share, Any] | None = None

    # The quorum

    def before_quorum(self) -> None:
        """Note that the quorum of the next step is requested."""
        self.steps.check()
        self.steps.return_all()
        self.is_asked, self.share, self._ballot, self._early, self._lines = True, None, None, None, None
        self._step_begins()

    def settle(self) -> None:
        """Wait for the quorum, deal its step, and begin the vote on it; once per step."""
        if self.share is not None or not self.is_asked:
            return
        size = self.samples
        early, self._early = self._early, None  # now: our own all-reduces also call this
        self.manager.wait_quorum()
        self._quorum_is_there()
        contributors, members, self.membership = self._see_members(size)
        self._is_new, self.members = members != self.members, members
        self.share = contributors.share(self.local)
        self._sizes = self.share.sizes(size, self.loader.micro_batch_size)
        self._ballot = self._begin_vote(contributors)
        self.steps.begin(size)
        self.is_weighed = False
        if early is not None:
            self._count_early(*early, self.share)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> None:
        """Call `settle` before anything is all-reduced, so that the vote comes first on every replica."""
        self.settle_early()

    def settle_early(self) -> None:
        """Call `settle` if a micro-batch is out that was handed out before the quorum was known."""
        if self._early is not None:
            self.settle()

    def _begin_vote(self, contributors: Contributors) -> Ballot:
        return Ballot(
            self.manager,
            samples=contributors.samples_here(self.loader.micro_batch_size),
            needed=self.samples,
            position=self.steps.samples,
            rule=self.rule,
            membership=self.membership if contributors.index == 0 else 0,
            begins_anew=self._hands_out_one_more,
            contributes=contributors.index is not None,
            replicas=len(contributors.replicas),
            device=reduce_device(self.manager),
        )

    def _count_early(self, guess: Share, batch: Any, share: Share) -> None:
        """Count the micro-batch handed out before the quorum was known as the first one of the step, or not at all."""
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
        """The micro-batches of this process in the step whose quorum was requested."""
        if not self.is_asked:
            raise StateError(
                "no quorum was asked for this step",
                found="a `for` over the loop",
                expected="optimizer.zero_grad() of torchft's Optimizer, or manager.start_quorum(), before it",
                cause="the optimizer is not torchft's; this is a second `for` in one step; or the loop is LocalSGD's "
                "or DiLoCo's, and the manager was attached in place of them",
                action="while loop.step < STEPS: optimizer.zero_grad(); for batch in loop: ...; optimizer.step()",
            )
        self.settle_early()
        self.steps.check_idle()
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
        """Check that a micro-batch without weight was not the step's last."""
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
        """Note that this is the next micro-batch of the step."""
        share = self.share
        assert share is not None
        self._weight = share.averaged * self._take(batch, share) / self.samples
        if self.log is not None and self.steps.is_whole:
            self._log_vote(share)

    @property
    def weight(self) -> float:
        """See `DealtSteps`."""
        self.settle()
        return super().weight

    def total(self, number: float) -> float:
        """See `DealtSteps`."""
        sum_of = torch.tensor([number], dtype=torch.float64, device=reduce_device(self.manager))
        self.manager.allreduce(sum_of, reduce_op=torch.distributed.ReduceOp.SUM).wait()
        self.is_weighed = True
        return float(sum_of)

    @property
    def ends_step(self) -> bool:
        """Whether the last micro-batch handed out ends its step."""
        if self._early is not None:
            guess, _ = self._early
            if len(guess.sizes(self.samples, self.loader.micro_batch_size)) > 1:
                return False  # for any quorum
            self.settle()
        return self.steps.is_whole

    # Whether the step counts

    def commit(self, should_commit: Callable[[], Any]) -> tuple[Share, int] | None:
        """Decide whether a trained step counts.

        Returns:
            this process's share of it, and the membership; None if it does not count.
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
        members, membership = self.members, ballot.decide()
        try:
            is_committed = bool(should_commit())
        finally:
            self.is_asked, self.share, self._ballot = False, None, None
        if not is_committed:
            self.members = ()  # whoever did it begins anew: some may not have heard what the others have
            steps.return_all()
            return None
        self.members = members  # even if it was just healed: the others continue from this step
        self._count_step("the step in which it joined")
        if membership is not None:
            self.membership = membership
        return share, self.membership

    def _log_vote(self, share: Share) -> None:
        """Record a vote. Waits for others only in a membership's first step, for its number in the first one's vote."""
        assert self._ballot is not None
        self.log_vote(share, self._ballot.decide() if self._is_new else self.membership)
