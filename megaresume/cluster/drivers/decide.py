"""Decides what follows an attempt, from what is known at its end.

    decide         finish, again, requeue, chain or refuse
    choose_nodes   which nodes train, and which are spare

Both are pure functions.

    the run says that it is finished               finish
    the job was cancelled                          refuse
    a mistake in the flags or the data             refuse; but not for something that only one node lacks
    Slurm has requeued the job itself              requeue
    too many attempts without a new checkpoint     refuse
    spare nodes, and no stop was requested         again, in this job
    anything else                                  requeue; chain, if requeue is not allowed and a job follows

Exit status 0 does not prove that the run is finished: srun returns it after a node failure, so does a run that was told
to stop, and a program that trains nothing would return it forever.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Action = Literal["finish", "again", "requeue", "chain", "refuse"]
#: why Slurm ended an attempt. ``requeue``: `scontrol requeue` by a user or operator.
Reason = Literal["cancelled", "time limit", "preemption", "node failure", "requeue"]
#: Ends for which an attempt need not have saved: they have external reasons.
_FROM_OUTSIDE: tuple[Reason | None, ...] = ("preemption", "requeue")
#: exit status of a program called with wrong arguments.
USAGE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BadNode:
    """A node with a problem."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """How a training ended."""

    #: exit status of the launcher.
    exit: int
    #: exit status of the rank that failed first, which launchers hide; None if unknown.
    rank_exit: int | None = None
    #: the first error of that rank, one line; "" if unknown.
    error: str = ""
    #: nodes that failed their check before the training, or the node of that rank.
    bad_nodes: tuple[BadNode, ...] = ()
    #: whether the training did not start because nodes failed their check.
    unchecked: bool = False
    #: whether the error is about something missing on one of several nodes: the flags are right, the node is not.
    of_node: bool = False

    def __str__(self) -> str:
        hidden = f" ({self.rank_exit} of the rank that failed first)" if self.rank_exit not in (None, self.exit) else ""
        return f"status {self.exit}{hidden}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmState:
    """Slurm's view of the attempt, and the options for what follows."""

    #: why Slurm ended it; None if it did not.
    reason: Reason | None = None
    #: whether Slurm has already requeued the job.
    requeued: bool = False
    #: whether Slurm announced a preemption by the signal that the job requested, and has not yet ended the attempt.
    preempting: bool = False
    #: whether the job may be requeued (REQUEUE).
    may_requeue: bool = True
    #: the next job of the chain; None if there is none.
    successor: str | None = None
    #: nodes that the job could get instead of its own.
    other_nodes: int = 0
    #: nodes of this job that would be left over without the failed ones; negative: too few to continue. None if all of
    #: its nodes train (TRAIN_NODES is not given).
    spares: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptProgress:
    """The progress of an attempt, from the lines that it wrote to its ledger; never another job's."""

    #: the last step, if the run says that it is finished.
    finished: int | None = None
    #: the step of its newest checkpoint; None if it has saved none.
    saved: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptHistory:
    """The earlier attempts, in this job or its chain."""

    #: consecutive attempts without a new checkpoint.
    fruitless: int = 0
    #: the furthest step that any attempt saved; None if none has.
    best: int | None = None
    #: the number of failures from which the run restarts (MAX_RESTARTS).
    max_restarts: int = 3
    #: nodes that are left out, and how many may be (EXCLUDE_NODES).
    excluded: tuple[str, ...] = ()
    max_excluded: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The next action."""

    action: Action
    #: the reason, one line for people.
    why: str
    #: consecutive attempts without a new checkpoint, including this one.
    fruitless: int = 0
    #: the furthest step saved, including by this one.
    best: int | None = None
    #: nodes to leave out from now on; for ``again``, to replace by spare ones.
    exclude: tuple[BadNode, ...] = ()


def decide(
    status: Status, signal: str | None, slurm: SlurmState, progress: AttemptProgress, history: AttemptHistory
) -> Decision:
    """Decide what follows an attempt.

    A checkpoint is new only if no earlier attempt got as far: attempts that all begin at the same early step, as a flag
    may say, would repeat the same steps forever.

    Args:
        status: how the training ended.
        signal: the first one that the driver received; None: none.
        slurm: Slurm's view.
        progress: what the attempt saved.
        history: the earlier attempts.
    """
    steps = [step for step in (progress.saved, history.best) if step is not None]
    decision = _decide(status, signal, slurm, progress, history)
    return replace(decision, best=max(steps, default=None))


def _decide(
    status: Status, signal: str | None, slurm: SlurmState, progress: AttemptProgress, history: AttemptHistory
) -> Decision:
    what = _what(status, signal, slurm)
    fruitless = 0
    if not _is_new(progress, history):
        is_from_outside = slurm.reason in _FROM_OUTSIDE or (slurm.preempting and not status.exit)
        fruitless = history.fruitless + (not is_from_outside)
    if progress.finished is not None:
        return Decision(action="finish", why=f"the run is over: it has said so after step {progress.finished}")
    if slurm.reason == "cancelled":
        return Decision(action="refuse", why=f"{what}; the same sbatch command continues", fruitless=fruitless)
    mistake = (status.exit if status.rank_exit is None else status.rank_exit) == USAGE and not status.of_node
    if mistake and progress.saved is None and signal is None and slurm.reason is None:
        why = f"{what}: a mistake in the flags or the data, which another attempt would not fix"
        return Decision(action="refuse", why=why, fruitless=fruitless)
    what = f"{what}, {_saved(progress, fruitless, history)}"
    # If Slurm ended the attempt, it ended all ranks: none failed first.
    exclude = () if signal or slurm.reason else _exclude(status.bad_nodes, slurm, history)
    if slurm.requeued:
        return Decision(action="requeue", why=what, fruitless=fruitless)
    if fruitless > history.max_restarts:
        return Decision(action="refuse", why=what, fruitless=fruitless)
    if slurm.spares is not None and slurm.spares >= 0 and not signal and slurm.reason is None:
        return Decision(action="again", why=what, fruitless=fruitless, exclude=status.bad_nodes)
    if slurm.may_requeue:
        return Decision(action="requeue", why=what, fruitless=fruitless, exclude=exclude)
    if slurm.successor is not None:
        return Decision(action="chain", why=what, fruitless=fruitless, exclude=exclude)
    why = f"{what}; REQUEUE=no, and no job follows: the same sbatch command continues"
    return Decision(action="refuse", why=why, fruitless=fruitless)


def decide_start(history: AttemptHistory) -> Decision | None:
    """Refuse an attempt that must not begin: Slurm itself may have restarted the job too often. None: it may begin."""
    if history.fruitless <= history.max_restarts:
        return None
    why = f"{history.fruitless} attempts in a row without a new checkpoint, MAX_RESTARTS={history.max_restarts}"
    return Decision(action="refuse", why=why, fruitless=history.fruitless)


def choose_nodes(nodes: Sequence[str], wanted: int, failed: Collection[str]) -> tuple[str, ...]:
    """The nodes of a job that train; the others are spare.

    Args:
        nodes: of the job, in Slurm's order, which is kept: the first one has number 0.
        wanted: the number that train.
        failed: only used if there are not enough others.
    """
    chosen = sorted(nodes, key=lambda node: node in failed)[:wanted]
    return tuple(node for node in nodes if node in chosen)


def _what(status: Status, signal: str | None, slurm: SlurmState) -> str:
    if slurm.reason == "cancelled":
        return "the job was cancelled"
    if slurm.reason is not None:
        return f"ended by Slurm ({slurm.reason})"
    if status.unchecked:
        named = "; ".join(f"{node.name}: {node.why}" for node in status.bad_nodes)
        return f"nodes failed their check: {named or status.error}"
    if status.exit:
        return f"failed with {status}" + (f" after {signal}" if signal else "")
    if signal is not None:
        return f"stopped by {signal}" + (" (preemption)" if slurm.preempting else "")
    return f"ended with {status}, and the run has not said that it is over"


def _is_new(progress: AttemptProgress, history: AttemptHistory) -> bool:
    return progress.saved is not None and (history.best is None or progress.saved > history.best)


def _saved(progress: AttemptProgress, fruitless: int, history: AttemptHistory) -> str:
    if _is_new(progress, history):
        return f"new checkpoint at step {progress.saved}"
    saved = "" if progress.saved is None else f" (step {progress.saved}, where one has come to {history.best})"
    if fruitless == history.fruitless:
        return f"no new checkpoint{saved}, which does not count"
    return f"attempt {fruitless} in a row without a new checkpoint{saved}, MAX_RESTARTS={history.max_restarts}"


def _exclude(nodes: tuple[BadNode, ...], slurm: SlurmState, history: AttemptHistory) -> tuple[BadNode, ...]:
    new = [node for node in nodes if node.name not in history.excluded]
    room = min(history.max_excluded - len(history.excluded), slurm.other_nodes)
    return tuple(new[: max(room, 0)])
