"""Choosing between a local root and its copies: whichever is newest and complete."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from megaresume.checkpoint.choose import Choice, Rejected, choose
from megaresume.checkpoint.commit import run_of
from megaresume.checkpoint.layout import ledger_path
from megaresume.checkpoint.ledger import abandoned_checkpoints, read_ledger
from megaresume.checkpoint.staging import share_ledger
from megaresume.stream.errors import CheckpointError

__all__ = ["adopt", "choose_of_two"]


def choose_of_two(
    local: str | os.PathLike[str],
    shared: str | os.PathLike[str],
    *,
    tag: str | None = None,
    iteration: int | None = None,
    checksums: bool = False,
) -> Choice | None:
    """What to load: each root is asked as `choose` does, then the newer choice is taken; the local one where both are
    of the same step. A shared one on a branch that the local ledger knows to be given up is passed over.

    Returns:
        `Choice.load_dir` says from which; what was passed over in the other is among ``rejected``. None: neither has a
        checkpoint.

    Raises:
        CheckpointError: neither has a complete one, or what was asked for; or the two are of different runs.
    """
    roots = [Path(os.path.abspath(root)) for root in (local, shared)]
    _check_same_run(*roots)
    found: list[Choice] = []
    failed: list[tuple[Path, CheckpointError]] = []
    for root in roots:
        try:
            choice = choose(root, tag=tag, iteration=iteration, checksums=checksums)
        except CheckpointError as error:
            failed.append((root, error))
            continue
        if choice is not None:
            found.append(choice)
    if not found:
        if failed:
            raise failed[0][1]
        return None
    given_up = abandoned_checkpoints(read_ledger(ledger_path(roots[0])).entries)
    best = max(found, key=lambda choice: _rank(choice, roots[0], given_up))
    others = [choice for choice in found if choice is not best]
    passed = [
        Rejected(tag=other.tag, iteration=other.iteration, reason=f"in {other.load_dir}: {_why(other, best, given_up)}")
        for other in others
    ]
    passed += [
        dataclasses.replace(rejected, reason=f"in {other.load_dir}: {rejected.reason}")
        for other in others
        for rejected in other.rejected
    ]
    notes = tuple(f"nothing is taken from {root}: {error.headline}" for root, error in failed)
    return dataclasses.replace(best, rejected=(*best.rejected, *passed), notes=(*best.notes, *notes))


def _rank(choice: Choice, local: Path, given_up: frozenset[tuple[int, str]]) -> tuple[bool, bool, int, bool]:
    """For comparing: with a data state, on the branch of the run, newer, local."""
    step = -1 if choice.iteration is None else choice.iteration
    return choice.step is not None, (step, choice.tag) not in given_up, step, choice.load_dir == local


def _why(other: Choice, best: Choice, given_up: frozenset[tuple[int, str]]) -> str:
    if other.iteration is not None and (other.iteration, other.tag) in given_up:
        return "it is of a branch given up before"
    if other.iteration == best.iteration:
        return "the same step is taken from the local storage"
    return f"{best.tag} in {best.load_dir} is newer"


def _check_same_run(local: Path, shared: Path) -> None:
    runs = run_of(local), run_of(shared)
    if None not in runs and runs[0] != runs[1]:
        raise CheckpointError(
            "the local checkpoints and the copies are of two runs",
            found=f"run {runs[0]} in {local}, run {runs[1]} in {shared}",
            expected="one run",
            cause="the local directory is left over from another job, or two jobs copy to one place",
            action="give every run a --save and a --megaresume-stage-to of its own; or empty the one that is left over",
        )


def adopt(local: Path, shared: Path) -> None:
    """Let an empty local root, on a node that is new to the run, know the run's ledger. Before its start is recorded.

    Raises:
        CheckpointError: it cannot be written.
    """
    if run_of(local) is None and run_of(shared) is not None:
        share_ledger(shared, local)
