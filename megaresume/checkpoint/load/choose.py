"""Chooses what to load, the same on all ranks.

choose              the newest complete checkpoint of a root, by the rules in `search`
choose_of_two       the newest complete one of a local root and its copies
confirm_choice      on every other rank. On shared filesystems, ranks may disagree about what exists: attribute caches
                    lag, a mount is missing on one node. A rank that silently started from something else would be
                    worse than a stop
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megaresume.checkpoint.load.search import Choice, Rejected, Search
from megaresume.checkpoint.records.branches import saves_given_up
from megaresume.checkpoint.records.candidates import list_candidates, run_of
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import check_tag, ledger_path, records_dir, split_root, step_path
from megaresume.checkpoint.records.step_file import StepFile, read_step_file
from megaresume.stream.errors import CheckpointError, NewerFormatError, StateError, UsageError
from megaresume.stream.progress import Progress

log = logging.getLogger(__name__)


def choose(
    load_dir: str | os.PathLike[str],
    *,
    tag: str | None = None,
    checksums: bool = False,
    progress: Progress | None = None,
    damaged: Mapping[Path, str] | None = None,
) -> Choice | None:
    """Decide what to load. Only reads; on rank 0, which then tells the others.

    Args:
        load_dir: the checkpoint root.
        tag: exactly this tag directory, or an error. ``global_step10_universal`` uses the data state of
            ``global_step10``, from which it was converted.
        checksums: verify every file that has a checksum in its manifest.
        progress: for checksums: called with the bytes just read, from several threads.
        damaged: tag directories that could not be read -> the reason; they are skipped.

    Returns:
        None if there is no checkpoint at all (or no such directory), or only saves interrupted by a kill in a run that
        never finished one; the caller decides whether that is an error.

    Raises:
        CheckpointError: the requested one is missing or incomplete; or there are checkpoints and none is complete.
        StateError: a record was written by a newer megaresume (`NewerFormatError`), or the ledger cannot be read.
    """
    root = Path(os.path.abspath(load_dir))
    check_root(root, lambda real, named: f"load from {real}, with the tag {named} if it must be exactly that one")
    if tag is not None:
        check_tag(tag)
    search = Search(root, run_of(root), tag, checksums=checksums, progress=progress, damaged=damaged)
    return search.newest() if tag is None else search.exactly_tag(tag)


def check_root(root: Path, instead: Callable[[Path, str], str]) -> None:
    """Raise a UsageError if what is named as a directory of checkpoints is a file, or a checkpoint.

    Args:
        root: an absolute path.
        instead: the next action, for the directory that holds the checkpoint, and its tag.
    """
    if root.exists() and not root.is_dir():
        raise UsageError(
            "the checkpoint directory is a file",
            found=str(root),
            expected="a directory",
            action="name another directory, or move that file away",
        )
    real_root, tag = split_root(root)
    if tag is not None and root.is_dir():
        raise UsageError(
            "this is a tag directory, not a checkpoint root",
            found=str(root),
            expected=f"the directory that holds it: {real_root}",
            action=instead(real_root, tag),
        )


def check_not_root(tag_dir: Path) -> None:
    """Raise a UsageError if what is named as a checkpoint is a directory of checkpoints."""
    if split_root(tag_dir)[1] is not None or not records_dir(tag_dir).is_dir():
        return
    inside = next((candidate.tag for candidate in list_candidates(tag_dir) if candidate.has_dir), None)
    if inside is not None:
        raise UsageError(
            "this is a directory of checkpoints, not a checkpoint",
            found=str(tag_dir),
            expected=f"one of those in it, as {tag_dir / inside}",
            action=f"load {tag_dir / inside}, or another that megaresume inspect {tag_dir} shows",
        )


def choose_of_two(
    local: str | os.PathLike[str],
    shared: str | os.PathLike[str],
    *,
    tag: str | None = None,
    damaged: Mapping[Path, str] | None = None,
) -> Choice | None:
    """Choose from two roots: each is searched as by `choose`, then the newer choice wins; the local one for the same
    step. A shared one on a branch that is abandoned according to the local ledger is skipped.

    Returns:
        `Choice.load_dir` tells which root; what was skipped in the other is in ``rejected``. None if neither has
        a checkpoint.

    Raises:
        CheckpointError: the run has saved and neither has a complete one, or the requested one; or the two are of
            different runs.
    """
    roots = [Path(os.path.abspath(root)) for root in (local, shared)]
    runs = [run_of(root) for root in roots]
    if None not in runs and runs[0] != runs[1]:
        raise different_runs_error(roots[0], runs[0], roots[1], runs[1])
    found: list[Choice] = []
    failed: list[tuple[Path, CheckpointError]] = []
    for root in roots:
        try:
            choice = choose(root, tag=tag, damaged=damaged)
        except CheckpointError as error:
            failed.append((root, error))
            continue
        if choice is not None:
            found.append(choice)
    if not found:
        _check_nothing_lost(*roots)
        if failed:
            raise failed[0][1]
        return None
    given_up = saves_given_up(roots[0])
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
    notes = tuple(f"no checkpoint is taken from {root}: {error.headline}" for root, error in failed)
    return dataclasses.replace(best, rejected=(*best.rejected, *passed), notes=(*best.notes, *notes))


def _rank(choice: Choice, local: Path, given_up: frozenset[str]) -> tuple[bool, bool, int, bool]:
    """The sort key of a choice: with a data state, on the run's branch, newer, local."""
    step = -1 if choice.iteration is None else choice.iteration
    return choice.record is not None, not _is_given_up(choice, given_up), step, choice.load_dir == local


def _is_given_up(choice: Choice, given_up: frozenset[str]) -> bool:
    return choice.record is not None and choice.record.save_id in given_up


def _why(other: Choice, best: Choice, given_up: frozenset[str]) -> str:
    if _is_given_up(other, given_up):
        return "it is on a branch that was given up"
    if other.iteration == best.iteration:
        return "the same step is taken from the local storage"
    return f"{best.tag} in {best.load_dir} is newer"


def different_runs_error(local: Path, run: str | None, shared: Path | str, other: str | None) -> CheckpointError:
    """The error for a local root and copies of different runs."""
    return CheckpointError(
        "the local checkpoints and the copies are of two runs",
        found=f"run {run} in {local}, run {other} in {shared}",
        expected="one run",
        cause="the local directory is left over from another job, or two jobs copy to one place",
        action="give every run its own --save and --megaresume-stage-to; or empty the one that is left over",
    )


def _check_nothing_lost(local: Path, shared: Path) -> None:
    """Raise a CheckpointError if neither root has a complete checkpoint, and the copies mention one.

    Only committed checkpoints are copied: if the local storage was lost during the first copy, a start from step 0
    would silently discard the run.
    """
    candidates = list_candidates(shared)
    if any(candidate.is_committed for candidate in candidates):
        return  # the copies were complete once: `choose` names them
    ledger = read_ledger(ledger_path(shared))
    said = [f"{entry.tag}, saved {entry.time}" for entry in ledger.entries if entry.kind == "checkpoint"]
    begun = [candidate.tag for candidate in candidates]
    if not (said or begun or ledger.problems):
        return
    found = [f"the ledger names {said[-1]}"] if said else [str(problem) for problem in ledger.problems]
    found += [f"the copy of {tag} is not complete" for tag in begun[:10]]
    raise CheckpointError(
        "the run has saved checkpoints, and neither they nor complete copies of them are there",
        found=f"in {shared}: {', '.join(found)}; none in {local}",
        expected="the checkpoints on the local storage, or a complete copy",
        cause="the local storage was lost before the first copy was complete, or is that of another node",
        action=f"start on the node that has {local}, or restore that directory; to start over, empty {shared}",
    )


def confirm_choice(
    load_dir: str | os.PathLike[str],
    choice: Choice | None,
    *,
    timeout_seconds: float = 30.0,
    poll_seconds: float = 0.5,
) -> StepFile | None:
    """Check on this rank that it sees rank 0's choice.

    Args:
        load_dir: the checkpoint root, as this rank sees it.
        choice: rank 0's; None if it found nothing.
        timeout_seconds: how long to wait for a filesystem with a lagging cache.
        poll_seconds: time between looks.

    Returns:
        the state as read by this rank, the same as rank 0's; None if rank 0 has none.

    Raises:
        CheckpointError: "this rank sees ...", after the timeout.
        NewerFormatError: this rank runs an older megaresume than the writer of the state.
    """
    root = Path(os.path.abspath(load_dir))
    deadline = time.monotonic() + timeout_seconds
    while True:
        seen, record = _look(root, choice)
        if seen is None:
            return record
        if time.monotonic() >= deadline:
            raise CheckpointError(
                f"this rank sees {seen}",
                found=f"on {os.uname().nodename}, in {root}",
                expected=f"what rank 0 chose: {choice or 'no checkpoint'}",
                cause="the directory is not on a filesystem that all nodes share, or a cache lags behind",
                action="mount the same directory on every node; then start again",
            )
        time.sleep(poll_seconds)


def _look(root: Path, choice: Choice | None) -> tuple[str | None, StepFile | None]:
    """How this rank's view differs from rank 0's, or None; and the state."""
    if choice is None:
        there = [c.tag for c in list_candidates(root) if c.has_dir and not c.unfinished]
        return (f"{there[0]}, where rank 0 sees no checkpoint" if there else None), None
    tag, chosen = choice.tag, choice.record
    if not (root / tag).is_dir():
        return f"no directory {tag}", None
    if chosen is None:
        return None, None
    own_tag = tag.removesuffix("_universal") if not step_path(root, chosen.iteration, tag).exists() else tag
    try:
        record = read_step_file(step_path(root, chosen.iteration, own_tag), iteration=chosen.iteration, tag=own_tag)
    except NewerFormatError:
        raise
    except StateError as error:
        return f"no usable data state of {tag}: {error.headline}", None
    if (record.state.digest, record.save_id) != (chosen.state.digest, chosen.save_id):
        return f"digest {record.state.digest} at {record.state.samples} samples (save {record.save_id})", None
    return None, record
