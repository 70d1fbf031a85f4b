"""What follows an attempt, from what is known when it has ended.

    decide         finish, again, requeue, chain or refuse
    choose_nodes   the nodes that spares replace

Both are pure: they ask nobody and do nothing.

    the run says that it is over                   finish
    somebody cancelled the job                     refuse
    a mistake in the flags or the data             refuse; but not what one node alone lacks
    Slurm has queued the job again itself          requeue
    too many attempts without a new checkpoint     refuse
    spare nodes, and nobody wants it to stop       again, in this job
    anything else                                  requeue; chain, if requeue is not allowed and a job follows

An exit status of 0 is no proof of an end: srun gives it after a node failure, a run that was told to stop ends with it,
and a program that trains nothing does so forever.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Action = Literal["finish", "again", "requeue", "chain", "refuse"]
#: why Slurm has ended an attempt. ``requeue``: somebody's `scontrol requeue`.
Reason = Literal["cancelled", "time limit", "preemption", "node failure", "requeue"]
#: The ends of an attempt that excuse it from having saved: they are nobody's fault.
_FROM_OUTSIDE: tuple[Reason | None, ...] = ("preemption", "requeue")
#: exit status of a program that was called in a wrong way.
USAGE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BadNode:
    """A node that something is wrong with."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The end of a training."""

    #: exit status of the launcher.
    exit: int
    #: exit status of the rank that failed first, which launchers hide; None if not known.
    rank_exit: int | None = None
    #: the first error of that rank, one line; "": not known.
    error: str = ""
    #: nodes that failed their check before the training, or the one of that rank.
    bad_nodes: tuple[BadNode, ...] = ()
    #: whether the training was not begun, because nodes failed their check.
    unchecked: bool = False
    #: whether that error is of something that one of several nodes lacks: the flags are right, the node is not.
    of_node: bool = False

    def __str__(self) -> str:
        hidden = f" ({self.rank_exit} of the rank that failed first)" if self.rank_exit not in (None, self.exit) else ""
        return f"status {self.exit}{hidden}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmState:
    """Slurm's view of the attempt, and what may follow it."""

    #: why Slurm has ended it; None if it has not.
    reason: Reason | None = None
    #: whether Slurm has queued the job again by itself.
    requeued: bool = False
    #: whether it has announced a preemption by the signal that the job asked for, and not ended the attempt yet.
    preempting: bool = False
    #: whether the job may be queued again (REQUEUE).
    may_requeue: bool = True
    #: the next job of the chain; None if there is none.
    successor: str | None = None
    #: nodes that the job could have in place of its own.
    other_nodes: int = 0
    #: nodes of this job that would be left over if it continued without those that failed; negative: too few to
    #: continue. None if all of its nodes train (TRAIN_NODES is not given).
    spares: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptProgress:
    """The progress of an attempt, by the lines that it wrote to the ledger of its checkpoints; never another job's."""

    #: the last step, if the run has said that it is over.
    finished: int | None = None
    #: the step of its newest checkpoint; None if it has saved none.
    saved: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptHistory:
    """The earlier attempts, in this job or its chain."""

    #: attempts in a row without a new checkpoint.
    fruitless: int = 0
    #: the furthest step that an attempt has saved; None if none has saved.
    best: int | None = None
    #: how many failures the run comes back from (MAX_RESTARTS).
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
    #: attempts in a row without a new checkpoint, with this one.
    fruitless: int = 0
    #: the furthest step that was saved, by this one too.
    best: int | None = None
    #: nodes to leave out from now on; ``again``: that spare ones replace.
    exclude: tuple[BadNode, ...] = ()


def decide(
    status: Status, signal: str | None, slurm: SlurmState, progress: AttemptProgress, history: AttemptHistory
) -> Decision:
    """Decide what follows an attempt.

    A checkpoint is new if no attempt before has come so far: one that begins at the same early step each time, as a
    flag may say, does the same steps forever.

    Args:
        status: how the training has ended.
        signal: the first one that the driver got; None: none.
        slurm: what Slurm says.
        progress: what the attempt has saved.
        history: what came before.
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
    # Of an attempt that Slurm has ended no rank has failed first: they were all ended.
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
    """Whether an attempt may begin at all: Slurm itself may have brought back one too many. None if it may."""
    if history.fruitless <= history.max_restarts:
        return None
    why = f"{history.fruitless} attempts in a row without a new checkpoint, MAX_RESTARTS={history.max_restarts}"
    return Decision(action="refuse", why=why, fruitless=history.fruitless)


def choose_nodes(nodes: Sequence[str], wanted: int, failed: Collection[str]) -> tuple[str, ...]:
    """The nodes of a job that train; the others are spare ones.

    Args:
        nodes: that it has, in Slurm's order, which stays: the first one has number 0.
        wanted: how many train.
        failed: those that have failed are taken only if there are not enough others.
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
