"""The start and the end of a run, as recorded in the ledger.

record_start        finishes or abandons an interrupted commit; records the start in the ledger
record_end          nothing is left to train: the only proof that launch scripts accept
distrust_tracker    Megatron's tracker may name a save that was never committed, and that a power cut has torn
check_fresh_start   a start from step 0 must not overwrite another run's checkpoints: that is what a forgotten load does
check_progress      stops a job that dies before its first save and is restarted again and again
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.lock.lock import release, take, write_tracker
from megaresume.checkpoint.records.candidates import examine, list_candidates, run_of
from megaresume.checkpoint.records.envelope import DataState
from megaresume.checkpoint.records.ledger import EntryKind, LedgerEntry, append_ledger, read_ledger, with_attempt
from megaresume.checkpoint.records.manifest import Manifest
from megaresume.checkpoint.records.marker import Marker, read_marker, remove_marker
from megaresume.checkpoint.records.names import TRACKER, ledger_path, marker_path, megatron_tag, records_dir, same_place
from megaresume.checkpoint.records.pointers import read_pointer
from megaresume.checkpoint.records.position import reached
from megaresume.checkpoint.records.step_file import StepFile, new_id
from megaresume.checkpoint.save.commit import abandon_save, publish, record_commit
from megaresume.checkpoint.save.retention import put_back
from megaresume.checkpoint.system import Topology, process_age, seconds_of, utc
from megaresume.files import make_dir, remove_leftovers
from megaresume.stream.errors import CheckpointError, UsageError, counted

log = logging.getLogger(__name__)


def record_start(
    save_dir: str | os.PathLike[str],
    *,
    iteration: int,
    state: DataState,
    choice: Choice | None = None,
    topology: Topology | None = None,
    details: Mapping[str, Any] | None = None,
) -> LedgerEntry:
    """Record that training begins here. On rank 0, once, before the first save; nothing else writes at that time.

    A killed commit that has written its manifest is finished (pointers, ledger line) if it is what was loaded; if
    something else was loaded, it was skipped on purpose, and its marker is removed. Saves that did not get that far
    keep their marker: their tag directories stay known as incomplete. Temporary files of killed writers are deleted.

    Args:
        save_dir: the checkpoint root that this run will save to; created if necessary.
        iteration: optimizer steps done at the start.
        state: of the data as restored, or at the beginning.
        choice: what was loaded; None: nothing.
        topology: the current layout of the run.
        details: anything else about this start for the ledger; plain JSON.

    Returns:
        the line that was appended.

    Raises:
        CheckpointError: the directory cannot be written.
        StateError: it was written by a newer megaresume.
    """
    root = Path(os.path.abspath(save_dir))
    tidy(root, choice)
    kept: dict[str, Any] = {**(details or {}), "start": new_id()}
    if choice is not None and choice.record is not None:
        kept["loaded"] = choice.record.save_id
    if (seconds := process_age()) is not None:
        kept["startup_seconds"] = round(seconds, 1)
    if (before := reached(root)) is not None:
        kept["reached"] = before
    if choice is not None and not same_place(choice.load_dir, root):
        kept["loaded_from"] = {"digest": choice.digest, "run": None if choice.record is None else choice.record.run}
    return _append(root, "start", iteration, None if choice is None else choice.tag, state, topology, kept)


def tidy(root: Path, choice: Choice | None = None) -> None:
    """Delete what killed writers left, and settle the commits that a kill interrupted: see `record_start`.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    make_dir(records_dir(root))
    remove_leftovers(root)
    remove_leftovers(records_dir(root))
    _settle(root, choice)


def record_end(save_dir: str | os.PathLike[str], *, iteration: int, state: DataState, topology: Topology) -> None:
    """Record that nothing is left to train. On rank 0, after the last save.

    Args:
        save_dir: the checkpoint root.
        iteration: the last optimizer step.
        state: of the data at the end.
        topology: the layout of the run.

    Raises:
        CheckpointError: the directory cannot be written.
        StateError: its ledger cannot be read.
    """
    _append(Path(os.path.abspath(save_dir)), "finished", iteration, None, state, topology, {})


def record_membership(
    save_dir: str | os.PathLike[str],
    *,
    iteration: int,
    state: DataState,
    topology: Topology,
    details: Mapping[str, Any],
) -> None:
    """Record who trains together from this step on. By one process, after the step was done; it need not own the
    directory.

    Args:
        save_dir: the checkpoint root.
        iteration: the first step that they did together.
        state: of the data after it.
        topology: their layout.
        details: who they are; plain JSON.

    Raises:
        CheckpointError: the directory cannot be written.
        StateError: its ledger cannot be read.
    """
    root = Path(os.path.abspath(save_dir))
    make_dir(records_dir(root))
    _append(root, "membership", iteration, None, state, topology, details)


def _append(
    root: Path,
    kind: EntryKind,
    iteration: int,
    tag: str | None,
    state: DataState,
    topology: Topology | None,
    details: Mapping[str, Any],
) -> LedgerEntry:
    entry = LedgerEntry(
        kind=kind,
        iteration=iteration,
        tag=tag,
        samples=state.samples,
        digest=state.digest,
        run=run_of(root) or new_id(),
        time=utc(time.time()),
        topology=topology or Topology(),
        details=with_attempt(details),
    )
    append_ledger(ledger_path(root), entry)
    return entry


def record_cut_commits(root: Path) -> None:
    """Record commits that a kill interrupted in the ledger. As the owner of the root, before the lines of other
    machines are added: a save belongs to the start before it.

    Raises:
        CheckpointError: the directory cannot be written.
        StateError: it was written by a newer megaresume, or its ledger cannot be read.
    """
    for record, manifest, _ in _cut_commits(root):
        if record.save_id not in _recorded(root):
            record_commit(root, record, manifest)


def _settle(root: Path, choice: Choice | None) -> None:
    own = choice if choice is not None and same_place(choice.load_dir, root) else None
    for record, manifest, marker in _cut_commits(root):
        if own is not None and (own.tag, own.iteration) == (record.tag, record.iteration):
            publish(root, record, manifest, marker, is_recorded=record.save_id in _recorded(root))
        else:
            remove_marker(marker_path(root, record.iteration, record.tag))


def _recorded(root: Path) -> set[Any]:
    """The saves that have a line in the ledger."""
    entries = read_ledger(ledger_path(root)).entries
    return {entry.details.get("save_id") for entry in entries if entry.kind == "checkpoint"}


def _cut_commits(root: Path) -> Iterator[tuple[StepFile, Manifest, Marker]]:
    """Checkpoints that a kill left complete, with their markers."""
    for candidate in list_candidates(root):
        if "saving" not in candidate.records or candidate.iteration is None:
            continue
        found = examine(root, candidate)
        if not found.is_settled or found.record is None or found.manifest is None:
            continue
        marker = read_marker(marker_path(root, candidate.iteration, candidate.tag))
        if marker is not None:
            yield found.record, found.manifest, marker


def distrust_tracker(root: Path) -> str | None:
    """Correct Megatron's tracker if it names a save that was never committed. On rank 0, as the owner of the root.

    Megatron moves its tracker before a save is committed. Without a commit, the files may contain anything once a
    machine that wrote them has gone down: the tracker is set back to the newest complete checkpoint, or removed if
    nothing was ever committed.

    If a Megatron schedules saves in its own way, nobody commits them: such a run would lose more than one save, so its
    tracker is trusted.

    Returns:
        the tag that is no longer named; None if nothing was changed.

    Raises:
        CheckpointError: no checkpoint is complete although some were committed, or the directory cannot be written.
    """
    tracker, candidates = read_pointer(root, TRACKER), list_candidates(root)
    named = next((c for c in candidates if c.tag == tracker.tag and c.unfinished), None)
    if named is None or named.iteration is None or named.tag != megatron_tag(named.iteration):
        return None
    marker = read_marker(marker_path(root, named.iteration, named.tag))
    if marker is None or marker.is_safe:
        return None
    choice = choose(root)
    complete = -1 if choice is None else choice.iteration
    if complete is None:
        return None
    if sum(c.unfinished and c.has_dir and complete < c.order <= named.order for c in candidates) > 1:
        return None
    if choice is None:
        (root / TRACKER).unlink()
    else:
        write_tracker(root, complete)
    return named.tag


def check_fresh_start(directory: str | os.PathLike[str], *, cause: str, load: str) -> None:
    """Refuse to save to a directory with checkpoints that this start did not resume from. Only reads.

    What a kill left in the middle of a first save is not a checkpoint.

    Args:
        directory: the checkpoint root.
        cause: how this can happen in this program.
        load: how to resume from it.

    Raises:
        UsageError: a checkpoint there is complete.
        CheckpointError: there are checkpoints, or were, and none is complete.
    """
    choice = choose(directory)
    if choice is None:
        return
    raise UsageError(
        "this start did not load a checkpoint of this directory, and would save over those that are there",
        found=f"{choice.tag} in {Path(directory).absolute()}",
        expected="a directory that this start has loaded from, or one without checkpoints",
        cause=cause,
        action=f"{load} to resume from it; to start over on purpose, save to another directory, or move this one away",
    )


#: how many starts from one step without a save in between are allowed.
MAX_STARTS = 5

#: a detail of a start: the finished run was launched again. Such a start does not count.
NOTHING_TO_TRAIN = "nothing_to_train"


def check_progress(
    save_dir: str | os.PathLike[str],
    *,
    iteration: int,
    save_interval: int | None = None,
    max_starts: int = MAX_STARTS,
) -> None:
    """Stop a run that starts from the same step again and again and never reaches its next save.

    On rank 0, after `record_start`, once it is clear that something is left to train.

    Args:
        save_dir: the checkpoint root.
        iteration: optimizer steps done at this start.
        save_interval: steps between saves, if known: the number to change.
        max_starts: how many starts are allowed; 0: any number.

    Raises:
        CheckpointError: more starts than that; with their times and an upper bound of how long they lived.
        StateError: the ledger cannot be read.
    """
    if max_starts < 1:
        return
    starts = starts_from(read_ledger(ledger_path(Path(os.path.abspath(save_dir)))).events, iteration)
    failed = starts[:-1]  # the last one is this start
    if len(failed) < max_starts:
        return
    lived, next_save, now = _lived(starts), "the next save", ""
    if save_interval is not None:
        next_save = f"the save at iteration {(iteration // save_interval + 1) * save_interval}"
        now = f" than every {save_interval} steps"
    raise CheckpointError(
        f"this run makes no progress: {counted(len(failed), 'start')} from iteration {iteration}, and none of them "
        "saved anything",
        found=f"the first began {failed[0].time}, the last {failed[-1].time}"
        + (f"; each lived at most {lived}" if lived else ""),
        expected=f"that one of them reaches {next_save}",
        cause="the same failure every time before that: look at the end of the last log, "
        f"megaresume doctor --log LOG; or the job is given less time than it needs to get to {next_save}",
        action=f"save more often{now}; to try {max_starts} times more without a change: "
        f"--megaresume-max-starts {len(failed) + max_starts} (of attach: max_starts=); 0 counts no starts",
    )


def starts_from(events: Sequence[LedgerEntry], iteration: int) -> list[LedgerEntry]:
    """The last starts in a ledger, all from this iteration, that had something to train and saved nothing.

    Args:
        events: `LedgerReading.events`.
        iteration: optimizer steps done.
    """
    starts: list[LedgerEntry] = []
    for entry in reversed(events):
        if entry.kind != "start" or entry.iteration != iteration:
            break
        if not entry.details.get(NOTHING_TO_TRAIN):
            starts.append(entry)
    return starts[::-1]


def _lived(starts: list[LedgerEntry]) -> str | None:
    """The longest time between two starts: an upper bound of how long each of them lived."""
    try:
        times = [seconds_of(entry.time) for entry in starts]
    except ValueError:
        return None
    longest = max(after - before for before, after in pairwise(times))
    return f"{longest / 60:.0f} minutes" if longest >= 120 else f"{longest:.0f} s"


def restore_older(root: Path, *, holds_parts: bool = False) -> None:
    """Restore saves that an unfinished second save of their step moved aside, and correct Megatron's tracker.

    So no start loads an unfinished save that a pointer names. On rank 0, as the owner of the root; with
    ``holds_parts``, on the owners of the nodes' roots.
    """
    for tag in put_back(root):
        log.warning("megaresume: the second save of %s did not end: the first one is restored", tag)
    if not holds_parts and (named := distrust_tracker(root)) is not None:
        log.warning(
            "megaresume: %s, which Megatron's tracker named, is not trusted: its save was not committed, and a machine "
            "that wrote it has gone down since, or belongs to another job",
            named,
        )


def give_up(root: Path, iteration: int, tag: str, *, holds_parts: bool = False) -> None:
    """After a failed save, make an older save of the step valid again, or free the space. On rank 0."""
    take(root)  # this job may have lost it while waiting to retry
    restore_older(root, holds_parts=holds_parts)
    abandon_save(root, iteration=iteration, tag=tag)


def restore_if_unlocked(root: Path) -> None:
    """`restore_older` in a directory that this run only reads so far, unless another job is saving there. On rank 0."""
    try:
        take(root)
    except CheckpointError as error:
        log.warning("megaresume: a step is being saved again in %s, or was: %s", root, error.headline)
        return
    try:
        restore_older(root)
    finally:
        release(root)
