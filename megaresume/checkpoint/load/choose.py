"""Choosing what to load, the same on all ranks; and the beginning and the end of a run, which follow from it.

choose              the newest complete checkpoint of a root, by the rules in `search`
choose_of_two       of a local root and its copies whichever is newest and complete
confirm_choice      on every other rank. On shared filesystems ranks may disagree about what exists: attribute caches
                    lag, a mount is missing on one node. A rank that quietly started from something else would be
                    worse than a stop
distrust_tracker    Megatron's tracker may name a save that was never committed, and a power cut has torn
check_fresh_start   a start from step 0 may not save over the checkpoints of another run: a forgotten load looks so
record_start        an interrupted commit is finished or abandoned; the start goes into the ledger
record_end          nothing is left to train: the only proof of it that launch scripts use
check_progress      a job that dies before its first save is started again, and again, for nothing
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from megaresume.checkpoint.load.search import Choice, Rejected, Search
from megaresume.checkpoint.lock.lock import release, take
from megaresume.checkpoint.records.branches import saves_given_up
from megaresume.checkpoint.records.candidates import examine, list_candidates, read_pointer, write_tracker
from megaresume.checkpoint.records.ledger import (
    EntryKind,
    LedgerEntry,
    append_ledger,
    read_ledger,
    with_attempt,
)
from megaresume.checkpoint.records.manifest import Manifest, Progress
from megaresume.checkpoint.records.names import (
    TRACKER,
    check_tag,
    ledger_path,
    marker_path,
    megatron_tag,
    records_dir,
    same_place,
    split_root,
    step_path,
)
from megaresume.checkpoint.records.position import reached
from megaresume.checkpoint.records.step_file import (
    DataState,
    Marker,
    StepFile,
    new_id,
    read_marker,
    read_step_file,
    remove_marker,
    run_of,
)
from megaresume.checkpoint.save.commit import abandon_save, publish, record_commit
from megaresume.checkpoint.save.retention import put_back
from megaresume.checkpoint.system import Topology, process_age, seconds_of, utc
from megaresume.files import make_dir, remove_leftovers
from megaresume.stream.errors import CheckpointError, NewerFormatError, StateError, UsageError, counted

log = logging.getLogger(__name__)


def choose(
    load_dir: str | os.PathLike[str],
    *,
    tag: str | None = None,
    checksums: bool = False,
    progress: Progress | None = None,
    damaged: Mapping[Path, str] | None = None,
) -> Choice | None:
    """Decide what to load. Reads only; on rank 0, which then tells the others.

    Args:
        load_dir: the checkpoint root.
        tag: exactly this tag directory, or an error. ``global_step10_universal`` takes the data state of
            ``global_step10``, from which it was converted.
        checksums: read every file that has a checksum in its manifest.
        progress: for checksums: called with the bytes just read, from several threads.
        damaged: tag directories that could not be read, with the reason; they are passed over.

    Returns:
        None if there is no checkpoint at all (or no such directory), or only saves that a kill cut short and the
        run never finished one; whether that is an error is for the caller.

    Raises:
        CheckpointError: what was asked for is missing or not whole; or there are checkpoints and none is complete.
        StateError: a record was written by a newer megaresume (`NewerFormatError`), or the ledger cannot be read.
    """
    root = Path(os.path.abspath(load_dir))
    _check_root(root)
    if tag is not None:
        check_tag(tag)
    search = Search(root, run_of(root), tag, checksums=checksums, progress=progress, damaged=damaged)
    return search.newest() if tag is None else search.exactly_tag(tag)


def _check_root(root: Path) -> None:
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
            action=f"load from {real_root}, with the tag {tag} if it must be exactly that one",
        )


def choose_of_two(
    local: str | os.PathLike[str],
    shared: str | os.PathLike[str],
    *,
    tag: str | None = None,
    damaged: Mapping[Path, str] | None = None,
) -> Choice | None:
    """What to load: each root is asked as `choose` does, then the newer choice is taken; the local one where both are
    of the same step. A shared one on a branch that the local ledger knows to be given up is passed over.

    Returns:
        `Choice.load_dir` says from which; what was passed over in the other is among ``rejected``. None if neither has
        a checkpoint.

    Raises:
        CheckpointError: neither has a complete one although the run has saved, or what was asked for; or the two are of
            different runs.
    """
    roots = [Path(os.path.abspath(root)) for root in (local, shared)]
    _check_same_run(*roots)
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
    """The sort key of a choice: with a data state, on the branch of the run, newer, local."""
    step = -1 if choice.iteration is None else choice.iteration
    return choice.step is not None, not _is_given_up(choice, given_up), step, choice.load_dir == local


def _is_given_up(choice: Choice, given_up: frozenset[str]) -> bool:
    return choice.step is not None and choice.step.save_id in given_up


def _why(other: Choice, best: Choice, given_up: frozenset[str]) -> str:
    if _is_given_up(other, given_up):
        return "it is on a branch that was given up"
    if other.iteration == best.iteration:
        return "the same step is taken from the local storage"
    return f"{best.tag} in {best.load_dir} is newer"


def _check_same_run(local: Path, shared: Path) -> None:
    runs = run_of(local), run_of(shared)
    if None not in runs and runs[0] != runs[1]:
        raise of_two_runs(local, runs[0], shared, runs[1])


def of_two_runs(local: Path, run: str | None, shared: Path | str, other: str | None) -> CheckpointError:
    """The error of a local root and copies that do not belong together."""
    return CheckpointError(
        "the local checkpoints and the copies are of two runs",
        found=f"run {run} in {local}, run {other} in {shared}",
        expected="one run",
        cause="the local directory is left over from another job, or two jobs copy to one place",
        action="give every run a --save and a --megaresume-stage-to of its own; or empty the one that is left over",
    )


def _check_nothing_lost(local: Path, shared: Path) -> None:
    """Raise a CheckpointError if neither root has a whole checkpoint, and the copies tell of one.

    Only what was committed is copied: if the local storage was lost in the middle of the first copy, a start from
    step 0 would throw the run away in silence.
    """
    candidates = list_candidates(shared)
    if any(candidate.is_committed for candidate in candidates):
        return  # copies that were whole and no longer are: `choose` names them
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
    """Check on this rank what rank 0 chose.

    Args:
        load_dir: the checkpoint root, as this rank sees it.
        choice: of rank 0; None if it found nothing.
        timeout_seconds: how long to wait for a filesystem whose cache lags behind.
        poll_seconds: how often to look meanwhile.

    Returns:
        the state that this rank read, the same as rank 0's; None if rank 0 has none.

    Raises:
        CheckpointError: "this rank sees ...", after the timeout.
        NewerFormatError: this rank runs an older megaresume than the one that wrote the state.
    """
    root = Path(os.path.abspath(load_dir))
    deadline = time.monotonic() + timeout_seconds
    while True:
        seen, step = _look(root, choice)
        if seen is None:
            return step
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
    """What this rank sees differently from rank 0, or None; and the state."""
    if choice is None:
        there = [c.tag for c in list_candidates(root) if c.has_dir and not c.unfinished]
        return (f"{there[0]}, where rank 0 sees no checkpoint" if there else None), None
    tag, chosen = choice.tag, choice.step
    if not (root / tag).is_dir():
        return f"no directory {tag}", None
    if chosen is None:
        return None, None
    own_tag = tag.removesuffix("_universal") if not step_path(root, chosen.iteration, tag).exists() else tag
    try:
        step = read_step_file(step_path(root, chosen.iteration, own_tag), iteration=chosen.iteration, tag=own_tag)
    except NewerFormatError:
        raise
    except StateError as error:
        return f"no usable data state of {tag}: {error.headline}", None
    if (step.state.digest, step.save_id) != (chosen.state.digest, chosen.save_id):
        return f"digest {step.state.digest} at {step.state.samples} samples (save {step.save_id})", None
    return None, step


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

    A commit that was killed after its manifest is finished if it is what was loaded (pointers, ledger line), and its
    marker is taken away if something else was loaded: it was passed over on purpose. Saves that did not get as far
    keep their marker: their tag directories stay known as incomplete. Temporary files of killed writers are deleted.

    Args:
        save_dir: the checkpoint root that this run will save to; created if need be.
        iteration: optimizer steps done at the start.
        state: of the data as restored, or at their beginning.
        choice: what was loaded; None: nothing.
        topology: how the run is laid out now.
        details: whatever else the ledger should keep about this start; plain JSON.

    Returns:
        the line that was appended.

    Raises:
        CheckpointError: the directory cannot be written.
        StateError: it was written by a newer megaresume.
    """
    root = Path(os.path.abspath(save_dir))
    tidy(root, choice)
    kept: dict[str, Any] = {**(details or {}), "start": new_id()}
    if choice is not None and choice.step is not None:
        kept["loaded"] = choice.step.save_id
    if (seconds := process_age()) is not None:
        kept["startup_seconds"] = round(seconds, 1)
    if (before := reached(root)) is not None:
        kept["reached"] = before
    if choice is not None and not same_place(choice.load_dir, root):
        kept["loaded_from"] = {"digest": choice.digest, "run": None if choice.step is None else choice.step.run}
    return _append(root, "start", iteration, None if choice is None else choice.tag, state, topology, kept)


def tidy(root: Path, choice: Choice | None = None) -> None:
    """Clear away what killed writers left, and settle the commits that a kill cut off: see `record_start`.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    make_dir(records_dir(root))
    remove_leftovers(root)
    remove_leftovers(records_dir(root))
    _settle(root, choice)


def record_end(
    save_dir: str | os.PathLike[str], *, iteration: int, state: DataState, topology: Topology | None = None
) -> LedgerEntry:
    """Record that nothing is left to train. On rank 0, after the last save.

    Args:
        save_dir: the checkpoint root.
        iteration: the last optimizer step.
        state: of the data at the end.
        topology: how the run is laid out.

    Returns:
        the line that was appended.

    Raises:
        CheckpointError: the directory cannot be written.
        StateError: its ledger cannot be read.
    """
    return _append(Path(os.path.abspath(save_dir)), "finished", iteration, None, state, topology, {})


def record_membership(
    save_dir: str | os.PathLike[str],
    *,
    iteration: int,
    state: DataState,
    topology: Topology,
    details: Mapping[str, Any],
) -> LedgerEntry:
    """Record who trains together since this step. By one process, after the step was made; it need not own the
    directory.

    Args:
        save_dir: the checkpoint root.
        iteration: the first step that they made together.
        state: of the data after it.
        topology: how they are laid out.
        details: who they are; plain JSON.

    Returns:
        the line that was appended.

    Raises:
        CheckpointError: the directory cannot be written.
        StateError: its ledger cannot be read.
    """
    root = Path(os.path.abspath(save_dir))
    make_dir(records_dir(root))
    return _append(root, "membership", iteration, None, state, topology, details)


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
    """Let the ledger know of commits that a kill cut off. As the owner of the root, before the lines of other machines
    are added: a save belongs to the start before it.

    Raises:
        CheckpointError: the directory cannot be written.
        StateError: it was written by a newer megaresume, or its ledger cannot be read.
    """
    for step, manifest, _ in _cut_commits(root):
        if step.save_id not in _recorded(root):
            record_commit(root, step, manifest)


def _settle(root: Path, choice: Choice | None) -> None:
    own = choice if choice is not None and same_place(choice.load_dir, root) else None
    for step, manifest, marker in _cut_commits(root):
        if own is not None and (own.tag, own.iteration) == (step.tag, step.iteration):
            publish(root, step, manifest, marker, is_recorded=step.save_id in _recorded(root))
        else:
            remove_marker(marker_path(root, step.iteration, step.tag))


def _recorded(root: Path) -> set[Any]:
    """The saves that the ledger has a line of."""
    entries = read_ledger(ledger_path(root)).entries
    return {entry.details.get("save_id") for entry in entries if entry.kind == "checkpoint"}


def _cut_commits(root: Path) -> Iterator[tuple[StepFile, Manifest, Marker]]:
    """What a kill has left whole, with its marker."""
    for candidate in list_candidates(root):
        if "saving" not in candidate.records or candidate.iteration is None:
            continue
        found = examine(root, candidate)
        if not found.is_settled or found.step is None or found.manifest is None:
            continue
        marker = read_marker(marker_path(root, candidate.iteration, candidate.tag))
        if marker is not None:
            yield found.step, found.manifest, marker


def distrust_tracker(root: Path) -> str | None:
    """Megatron moves its tracker before a save is committed. If that never was, the files may hold anything as soon as
    a machine that wrote them has gone down: the tracker names the newest complete checkpoint again, or none is left if
    nothing was ever committed. On rank 0, as the owner of the root.

    Nobody commits the saves of a Megatron that schedules them in a way of its own: such a run would lose more than one
    save, and its tracker is believed.

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
    """Refuse to save to a directory that holds checkpoints which this start did not resume from. Reads only.

    What a kill in the middle of a first save has left is not a checkpoint.

    Args:
        directory: the checkpoint root.
        cause: how that can happen in this program.
        load: how to resume from it.

    Raises:
        UsageError: one of them is complete.
        CheckpointError: there are some, or were, and none is complete.
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
#: among the details of a start: the run was over, and was launched again. Such a start does not count.
NOTHING_TO_TRAIN = "nothing_to_train"


def check_progress(
    save_dir: str | os.PathLike[str],
    *,
    iteration: int,
    save_interval: int | None = None,
    max_starts: int = MAX_STARTS,
) -> None:
    """Stop a run that starts from the same place again and again and never gets to its next save. On rank 0, after
    `record_start`, once it is clear that there is something left to train.

    Args:
        save_dir: the checkpoint root.
        iteration: optimizer steps done at this start.
        save_interval: steps between saves, if that is known: the number to change.
        max_starts: how many starts are allowed; 0: any number.

    Raises:
        CheckpointError: more starts than that, with when they were and how long they can have lived.
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
    """The starts from an iteration at the end of a ledger which had something to train and saved nothing.

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
    """On rank 0, as the owner of the root; and on others that own one which ``holds_parts``: no start takes what its
    pointers name."""
    for tag in put_back(root):
        log.warning("megaresume: the second save of %s did not end: the first one is restored", tag)
    if not holds_parts and (named := distrust_tracker(root)) is not None:
        log.warning(
            "megaresume: %s, which Megatron's tracker named, is not trusted: its save was not committed, and a machine "
            "that wrote it has gone down since, or belongs to another job",
            named,
        )


def give_up(root: Path, iteration: int, tag: str, *, holds_parts: bool = False) -> None:
    """On rank 0, after a save that failed: an older save of the step counts again, or the space is free."""
    take(root)  # waiting to try again, this job may have lost it
    restore_older(root, holds_parts=holds_parts)
    abandon_save(root, iteration=iteration, tag=tag)


def restore_if_unlocked(root: Path) -> None:
    """On rank 0, for a directory that this run only reads, so far: not what another job is saving there now."""
    try:
        take(root)
    except CheckpointError as error:
        log.warning("megaresume: a step is being saved again in %s, or was: %s", root, error.headline)
        return
    try:
        restore_older(root)
    finally:
        release(root)
