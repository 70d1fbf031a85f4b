"""Divides a step's samples between torchft's replicas, and decides whether it counts. Knows no session and no files.

    the quorum is known   `who_contributes`: whose gradients torchft adds up   -> `Contributors`
    the samples           `Contributors.share`: those of one process           -> `Share`
    during training       `Ballot`: samples, positions and memberships of all replicas, added up like the gradients
    before the commit     `Ballot.decide`: it counts if they form one step, at one position

Replicas deal out a step independently, so all must use the same rule: `Rule`.

A *membership* is a number for a set of replicas that train together. The first of them chooses it, greater than any
before; the ballot tells it to the others. Logs call it ``launch``: see `rank_log`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from megaresume.stream.dealing import in_even_parts, places_of
from megaresume.stream.errors import StateError

#: what is used of torchft's Manager, here and in the host. A version that lacks one is refused.
OF_MANAGER = (
    "_healing",
    "_load_state_dict_fns",
    "_manager_state_dict",
    "_pg",
    "_quorum_id",
    "_replica_id",
    "_store",
    "_use_async_quorum",
    "allreduce",
    "current_step",
    "errored",
    "is_participating",
    "load_state_dict",
    "num_participants",
    "participating_rank",
    "register_state_dict_fn",
    "report_error",
    "should_commit",
    "start_quorum",
    "wait_quorum",
)


#: numbers that represent larger ones in a vote: their squares add up to less than 2 ** 53.
BUCKETS = 1 << 20


def are_equal(count: int, total: int, squares: int) -> bool:
    """Whether numbers are all the same.

    Args:
        count: how many there are.
        total, squares: their sum, and the sum of their squares.
    """
    return count * squares == total**2


@dataclass(frozen=True)
class Rule:
    """The rule by which a replica deals out steps: if replicas' rules differed, samples would be repeated or lost.

    Args:
        parts: name -> value, in words.
    """

    parts: Mapping[str, str]

    @functools.cached_property
    def number(self) -> int:
        """The number that represents it in a vote."""
        return xxhash.xxh3_64_intdigest(repr(sorted(self.parts.items())).encode()) % BUCKETS

    def check_votes(self, votes: int, numbers: int, squares: int) -> None:
        """Raise a StateError, on every replica, unless all that voted have the same rule.

        Args:
            votes: their number.
            numbers, squares: sums of the rules' numbers, and of their squares.
        """
        if not are_equal(votes, numbers, squares):
            raise _other_rule(self.parts, "something else")

    def check_of_sender(self, theirs: Mapping[str, str]) -> None:
        """Raise a StateError unless the replica that sent its weights to this one has the same rule."""
        if other := [name for name, part in self.parts.items() if theirs[name] != part]:
            raise _other_rule(
                {name: self.parts[name] for name in other}, _worded({name: theirs[name] for name in other})
            )


def _worded(parts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {part}" for name, part in parts.items())


def _other_rule(mine: Mapping[str, str], theirs: str) -> StateError:
    return StateError(
        "the replicas deal out different steps",
        found=f"{_worded(mine)}; on other replicas: {theirs}",
        expected="the same on every replica",
        cause="one was started with another batch_size, global_batch_size, balance, dataset, skip or stages",
        action="start all replicas with the same ones; to change one, stop all of them first",
    )


@dataclass(frozen=True, slots=True)
class Share:
    """The samples of a step that this process trains.

    Args:
        size: number of processes that get samples, over all replicas.
        rank: number of this one among them; None: it does not contribute, and gets the first one's samples, without
            weight.
        averaged: number of processes over which gradients are averaged.
    """

    size: int
    rank: int | None
    averaged: int

    def sizes(self, samples: int, micro_batch_size: int) -> list[tuple[int, int]]:
        """Samples in each micro-batch of a step of this many samples: over all processes, and in this one."""
        sizes = in_even_parts(samples, micro_batch_size=micro_batch_size, dp_size=self.size)
        if self.rank is None:
            return [(size, 0) for size in sizes]
        places = places_of(sizes, dp_rank=self.rank, dp_size=self.size)
        return [(size, place.stop - place.start) for size, place in zip(sizes, places, strict=True)]


@dataclass(frozen=True, slots=True)
class Contributors:
    """The replicas whose gradients form a step.

    Args:
        replicas: numbers of the contributors in the quorum; ascending.
        index: of this one among them; None: it does not contribute.
        participants: number of replicas that torchft counts, and divides the gradients by.
        processes: per replica.
        samples: per step, over all replicas.
    """

    replicas: tuple[int, ...]
    index: int | None
    participants: int
    processes: int
    samples: int

    @property
    def size(self) -> int:
        """Number of processes that get samples: at most the number of samples."""
        return min(len(self.replicas) * self.processes, self.samples)

    def share(self, process: int) -> Share:
        """The share of a process of this replica."""
        rank = None if self.index is None else self.index * self.processes + process
        if rank is not None and rank >= self.size:
            rank = None
        return Share(self.size or 1, rank, self.participants * self.processes)

    def samples_here(self, micro_batch_size: int) -> int:
        """Samples of the step that this replica trains in all of its processes."""
        shares = [self.share(process) for process in range(self.processes)]
        return sum(mine for share in shares for _, mine in share.sizes(self.samples, micro_batch_size))


def who_contributes(manager: Any, *, processes: int, samples: int) -> Contributors:
    """Wait for the quorum, and see whose gradients torchft adds up; see `Contributors`.

    With the asynchronous quorum, torchft counts the replicas that are being healed in step 0 as participants, and adds
    none of their gradients. In that case the replicas are asked.
    """
    participants, number = manager.num_participants(), manager.participating_rank()
    mine = number if manager.is_participating() else None
    replicas = list(range(participants))
    if manager._use_async_quorum and not manager.current_step():
        replicas = _ask(manager, participants, mine) or replicas
    index = replicas.index(mine) if mine in replicas else None
    return Contributors(tuple(replicas), index, participants, processes, samples)


def _ask(manager: Any, participants: int, mine: int | None) -> list[int]:
    """The participants that say they contribute."""
    here = torch.zeros(participants, device=reduce_device(manager))
    if mine is not None:
        here[mine] = 1
    manager.allreduce(here, reduce_op=torch.distributed.ReduceOp.SUM).wait()
    return [number for number, one in enumerate(here.tolist()) if one]


def reduce_device(manager: Any) -> torch.device:
    """The device of tensors for torchft's process group."""
    is_on_gpu = "nccl" in manager._pg.getBackendName().lower()
    return torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")


class Ballot:
    """The replicas' votes on a step, added up by torchft like their gradients, by one all-reduce of a few numbers
    during training.

    Args:
        manager: torchft's.
        samples: those trained by this replica.
        needed: samples in the step, over all replicas.
        position: of this replica.
        rule: by which it deals out steps.
        membership: from the first of the replicas, above 0; 0 from all others.
        begins_anew: whether its step begins with a micro-batch without weight: see `torchft_steps`.
        contributes: whether the gradients of this replica count.
        replicas: number of contributors.
        device: for the all-reduce.
    """

    def __init__(
        self,
        manager: Any,
        *,
        samples: int,
        needed: int,
        position: int,
        rule: Rule,
        membership: int,
        begins_anew: bool,
        contributes: bool,
        replicas: int,
        device: torch.device,
    ) -> None:
        self._manager, self._needed, self._contributes = manager, needed, contributes
        self._position, self._replicas, self._begins_anew, self._rule = position, replicas, begins_anew, rule
        self._is_decided = False
        self._membership: int | None = None
        mine = [samples, position, membership, begins_anew, 1, number := rule.number, number**2]
        mine = mine if contributes else [0] * len(mine)
        # Integers below 2 ** 53.
        self._sum = torch.tensor(mine, dtype=torch.float64, device=device)
        self._work = manager.allreduce(self._sum, reduce_op=torch.distributed.ReduceOp.SUM)

    def decide(self) -> int | None:
        """Wait for all replicas' votes. If they do not form a step, report that to torchft, which then does not commit
        it; only once, even if called again.

        Returns:
            the membership; None if the step must not be committed.

        Raises:
            StateError: their rules differ; raised on every replica.
        """
        if not self._is_decided:
            self._is_decided, self._membership = True, self._count()
        return self._membership

    def _count(self) -> int | None:
        self._work.wait()
        if self._manager.errored():
            return None
        samples, position, membership, anew, *rules = (int(number) for number in self._sum.tolist())
        self._rule.check_votes(*rules)
        # A replica that does not contribute may be healed, and be told its position later.
        position, expected = (position, self._position * self._replicas) if self._contributes else (0, 0)
        everybody = self._replicas * self._begins_anew
        if (samples, position, anew) == (self._needed, expected, everybody):
            return membership
        self._manager.report_error(
            StateError(
                "the replicas do not make up a step",
                found=f"{samples} samples, positions with the sum {position}, and {anew} replicas that begin anew",
                expected=f"{self._needed} samples, the sum {expected}, and {everybody}",
                cause="torchft's process group is not that of its quorum, or replicas are in different steps",
                action="none: the step is not committed, and trained again",
            )
        )
        return None
