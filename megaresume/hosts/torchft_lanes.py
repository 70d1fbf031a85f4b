"""`LaneSteps`: the outer steps of one replica under torchft's LocalSGD or DiLoCo, from their samples to their commit.

A replica does ``sync_every`` inner steps by itself before torchft asks who is there. So an outer step is dealt when the
previous one ends, to the replicas of that quorum, each of which trains its *lane*:

    quorum of step N       vote      weights are averaged   step N committed   lanes of step N + 1
    |-- who is there? -----|-- all lanes of step N are there? -----------------|-- inner steps ... --| quorum of N + 1

    a replica has left     its lane is missing: the step is not committed, all go back to the weights before it, and its
                           samples are dealt to those who are there
    a replica has joined   it has no lane: its weight is 0, and it is sent the weights that result from the others'
        lanes
    nobody has a lane      a run begins: nothing is committed, and lanes are dealt

A replica without a lane does no inner steps: it joins the quorum at once, and waits there for the others.

Every replica decides by the same sums, so that all decisions agree: `LaneVote`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from megaresume.hosts.torchft_dealing import BUCKETS, Share, are_equal, reduce_device
from megaresume.hosts.torchft_dealt import DealtSteps
from megaresume.stream.errors import StateError, UsageError


@dataclass(frozen=True, slots=True)
class LaneVote:
    """The sums of all replicas' votes at the end of an outer step.

    Args:
        samples: trained in lanes.
        lanes: number of replicas that have trained one.
        memberships, squares: sums over the lanes of the membership in which each was dealt, and of its square.
        membership: the same membership, from the first lane.
        next_membership: of those who are there now.
        position: sum of the positions of all replicas.
        weights, weight_squares: sums over all replicas of a hash of their weights, and of its square.
        votes: number of votes.
        rules, rule_squares: sums of the rules' numbers, and of their squares.
    """

    samples: int = 0
    lanes: int = 0
    memberships: int = 0
    squares: int = 0
    membership: int = 0
    next_membership: int = 0
    position: int = 0
    weights: int = 0
    weight_squares: int = 0
    votes: int = 0
    rules: int = 0
    rule_squares: int = 0

    def numbers(self) -> list[int]:
        """All sums, in order."""
        return [getattr(self, name) for name in self.__slots__]

    def is_whole(self, samples: int) -> bool:
        """Whether these are all lanes of one step."""
        return self.samples == samples and are_equal(self.lanes, self.memberships, self.squares)


class Boundary:
    """Weights and inner optimizer state at the beginning of the outer step, so that a step that is not committed leaves
    no trace.

    Args:
        parameters: to be kept; empty for DiLoCo, which keeps them itself.
        optimizer: the inner one.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        #: the kept values. Never changed in place: another thread may be sending them.
        self.kept: dict[str, Any] = {}

    def take(self) -> None:
        """Keep the current values."""
        self.kept = _copied({"weights": list(self._parameters), "inner": self._optimizer.state_dict()["state"]})

    def restore(self) -> None:
        """Restore the kept values. Learning rates are not restored: a scheduler continues."""
        kept = _copied(self.kept)
        with torch.no_grad():
            for parameter, value in zip(self._parameters, kept["weights"], strict=True):
                parameter.copy_(value)
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": kept["inner"], "param_groups": groups})


def _copied(value: Any) -> Any:
    """A copy with new tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


class LaneSteps(DealtSteps):
    """The outer steps of one replica, see `DealtSteps`; ``samples`` are those of an outer step.

    Args:
        outer: torchft's LocalSGD or DiLoCo.
        boundary: restores weights and inner optimizer.
        inner_samples: per inner step, over all replicas.
    """

    def __init__(self, outer: Any, boundary: Boundary, *args: Any, inner_samples: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._outer, self.boundary, self._inner_samples = outer, boundary, inner_samples
        #: number of micro-batches at the end of each inner step; inner steps done.
        self._ends: list[int] = []
        self._made = 0
        #: whether the outer step is being synchronised without inner steps.
        self._is_joining = False
        #: the lane of the next outer step, and its membership, once the vote is known; later ``share`` and
        #: ``membership``.
        self._dealt: tuple[Share, int] | None = None
        #: the vote on a complete outer step, while its weights are averaged; otherwise None.
        self._voted: LaneVote | None = None
        self._outer._local_optimizer.register_step_pre_hook(self._inner_step)

    def restart(self, membership: int) -> None:
        """See `DealtSteps`. The lane is lost."""
        super().restart(membership)
        self.share = None

    # Micro-batches

    def batches(self) -> Iterator[Any]:
        """The micro-batches of this replica in the next outer step, for all its inner steps. Without a lane there are
        none: it then waits for the others, and for the step that they commit.
        """
        self.steps.check_idle()
        if not self._outer._hooks:
            name = type(self._outer).__name__
            raise UsageError(
                f"{name} is not entered",
                found="a `for` over the loop",
                expected=f"within `with {name}(...) as outer:`",
                cause="it synchronises the replicas only there",
                action="put the loop into the `with`",
            )
        self._step_begins()
        self.boundary.take()
        if self.share is None or self.share.rank is None:
            self._join()
            return
        self._open(self.share)
        of_inner_step = 0
        for _ in range(len(self._sizes)):
            batch = self._next(self.share)
            mine, number = self._take(batch, self.share), len(self.steps.out)
            if number - 1 in (0, *self._ends):
                ends = next(end for end in self._ends if end >= number)
                of_inner_step = sum(one for _, one in self._sizes[number - 1 : ends])
            self._weight = mine / max(of_inner_step, 1)
            yield batch

    def _open(self, share: Share) -> None:
        """Begin the inner steps of a lane: ``sync_every`` steps, to which its micro-batches are distributed evenly."""
        self.loader.micro_batch_size = min(self._micro_batch_size, max(self._inner_samples // share.size, 1))
        self._sizes = share.sizes(self.samples, self.loader.micro_batch_size)
        count, inner = len(self._sizes), self._outer._sync_every
        self._ends = [count * number // inner for number in range(1, inner + 1)]
        self._made, self.is_weighed = 0, False
        self.steps.begin(self.samples)

    def _join(self) -> None:
        """Synchronise without inner steps, as torchft does after the last one."""
        outer = self._outer
        outer._local_step, self._is_joining = outer._sync_every - 1, True
        try:
            outer._step_post_hook(outer._local_optimizer, (), {})
        finally:
            self._is_joining = False

    @property
    def ends_step(self) -> bool:
        """See `DealtSteps`."""
        return len(self.steps.out) in self._ends

    def total(self, number: float) -> float:
        """Not supported."""
        raise self.steps.fail(
            UsageError(
                "loop.total() cannot be used with LocalSGD and DiLoCo",
                found="a sum over all replicas within an inner step",
                expected="inner steps that each replica makes by itself",
                action="divide by what this replica has summed in its inner step, up to loop.ends_step",
            )
        )

    def _inner_step(self, *_: Any) -> None:
        """Called before the inner optimizer steps."""
        self.steps.check()
        if self._made == len(self._ends) or len(self.steps.out) != self._ends[self._made]:
            raise self.steps.fail(
                StateError(
                    "an inner step is made in the wrong place",
                    found=f"optimizer.step() after {len(self.steps.out)} micro-batches of this outer step",
                    expected=f"one each after {', '.join(map(str, self._ends)) or 'none'}",
                    cause="it is called after every micro-batch, or after a `for` has ended",
                    action="if loop.ends_step: optimizer.step(); optimizer.zero_grad()",
                )
            )
        self._made += 1

    # The quorum, and the vote

    def before_quorum(self) -> None:
        """See `DealtSteps`."""
        steps = self.steps
        steps.check()
        self._lines = self._dealt = self._voted = None
        if self._is_joining:
            return
        steps.check_step()
        if not self.is_weighed:
            raise steps.fail(
                UsageError(
                    "the loss was not weighed",
                    found="an outer step in which loop.weight was not read",
                    expected="(loss * loop.weight).backward(), where loss is the mean over a micro-batch's samples",
                    cause="the micro-batches of an inner step have different numbers of samples",
                    action="multiply each loss by loop.weight",
                )
            )

    def after_quorum(self) -> None:
        """Vote on the outer step when the quorum is known, and deal the next one to those who are there."""
        self._quorum_is_there()
        manager, steps = self.manager, self.steps
        contributors, members, membership = self._see_members(self._inner_samples)
        vote = self._vote(None if contributors.index is None else membership * (contributors.index == 0))
        if vote is None:
            self.members = ()
            return
        self.rule.check_votes(vote.votes, vote.rules, vote.rule_squares)
        self._check_weights(vote, len(contributors.replicas))
        if vote.position != steps.samples * len(contributors.replicas):
            self.members = ()
            found, expected = (
                f"positions with the sum {vote.position}",
                f"{len(contributors.replicas)} at {steps.samples}",
            )
            cause = "torchft's process group is not that of its quorum, or replicas are in different steps"
        else:
            self.members = members
            self._dealt = contributors.share(self.local), vote.next_membership
            if vote.is_whole(self.samples):
                self._voted = vote
                if self.share is not None:
                    self.log_vote(self.share, self.membership)
                return
            found, expected = f"{vote.samples} samples in {vote.lanes} lanes", f"{self.samples}"
            cause = "replicas have left or joined, or the run begins"
        action = "none: the outer step is not committed; its samples are dealt to those who are there, and trained"
        manager.report_error(
            StateError(
                "the lanes do not make up an outer step", found=found, expected=expected, cause=cause, action=action
            )
        )

    @property
    def _trained(self) -> int:
        """Samples of this replica's lane, if it has trained it; 0 without a lane."""
        return sum(mine for _, mine in self._sizes) if self.share is not None and self.share.rank is not None else 0

    def _vote(self, membership: int | None) -> LaneVote | None:
        """Send this replica's vote to all, and get the sum of all votes; None: nothing was received.

        Args:
            membership: of those who are there now, from the first of them; 0 from others; None: does not count.
        """
        manager, steps, lane = self.manager, self.steps, self.share
        mine = LaneVote()
        if membership is not None:
            has_lane = lane is not None and lane.rank is not None
            bucket, weights = self.membership % BUCKETS, 0 if steps.step else self._hash_weights()
            mine = LaneVote(
                samples=self._trained,
                lanes=int(has_lane),
                memberships=bucket * has_lane,
                squares=bucket**2 * has_lane,
                membership=self.membership if lane is not None and lane.rank == 0 else 0,
                next_membership=membership,
                position=steps.samples,
                weights=weights,
                weight_squares=weights**2,
                votes=1,
                rules=(number := self.rule.number),
                rule_squares=number**2,
            )
        # Integers below 2 ** 53.
        sums = torch.tensor(mine.numbers(), dtype=torch.float64, device=reduce_device(manager))
        manager.allreduce(sums, reduce_op=torch.distributed.ReduceOp.SUM).wait()
        return None if manager.errored() else LaneVote(*(int(number) for number in sums.tolist()))

    def _hash_weights(self) -> int:
        tensors = itertools.chain(self.boundary.kept["weights"], *self._backups())
        hasher = xxhash.xxh3_64()
        for tensor in tensors:
            hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return hasher.intdigest() % BUCKETS

    def _backups(self) -> list[Any]:
        """The weights kept by DiLoCo."""
        return [fragment.original_parameters.values() for fragment in getattr(self._outer, "_fragments", ())]

    def _check_weights(self, vote: LaneVote, replicas: int) -> None:
        """Check before the first outer step that all weights are equal: nobody sends weights then."""
        if are_equal(replicas, vote.weights, vote.weight_squares):
            return
        raise self.steps.fail(
            StateError(
                "the replicas begin with different weights",
                found=f"other weights on some of the {replicas} replicas",
                expected="the same, as Manager(init_sync=False) gives no replica those of another one at the start",
                action="torch.manual_seed(SEED) before the model is made, on every replica",
            )
        )

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> None:
        """Weight weights, or their changes: torchft takes the mean over the replicas that are there, some of which may
        have a larger lane, or none.
        """
        average = torch.distributed.ReduceOp.AVG
        if self._voted is None or kwargs.get("reduce_op", args[1] if len(args) > 1 else average) != average:
            return
        assert self.contributors is not None
        factor = self.contributors.participants * self._trained / self.samples
        with torch.no_grad():
            if not factor:
                tensor.zero_()
            elif factor != 1:
                tensor.mul_(factor)

    def commit(self, should_commit: Callable[[], Any]) -> tuple[Share, int] | None:
        """See `DealtSteps`."""
        steps, lane, dealt_in, vote = self.steps, self.share, self.membership, self._voted
        try:
            is_committed = bool(should_commit())
        finally:
            self._voted = None
        self.share = None
        if is_committed and vote is None:
            raise steps.fail(steps.untrained("torchft has committed an outer step that the replicas do not make up"))
        if vote is not None and not is_committed:
            self.members = ()  # some may not have heard what the others have
        elif self._dealt is not None:
            self.share, self.membership = self._dealt
        if vote is None or not is_committed:
            steps.return_all()
            self.boundary.restore()
            return None
        self._count_step("the outer step in which it joined")
        return lane or Share(vote.lanes, None, vote.lanes), dealt_in if lane is not None else vote.membership
