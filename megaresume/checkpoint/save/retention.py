"""What happens to older checkpoints when a new one is saved.

A step that is saved again: the older save is moved aside, and restored if the newer one does not finish.

    make_room      before the marker of the new save. Moved into .step_0000010@global_step10.older/, in this order:
                   manifest                  <- from here the step is not valid
                   data state (a copy), files of each rank
                   tag directory
    ... the new save, like any other, in a new tag directory ...
    remove_older   when the new one is durable
    put_back       at the next start, if the new one is not valid: everything moves back, in this order:
                   tag directory, data state, files of each rank
                   manifest                  <- from here the step is valid again

So a save never writes among the files of an older one, which may be from more ranks, and the older one exists until the
newer one does. The leftovers of an unfinished save do not count as an older save: they are deleted.

Removing old checkpoints: which ones, and how.

    a checkpoint is durable -> prune    kept: the newest K durable ones, every N-th, and those that a pointer names
                                        the other complete ones: renamed out of sight, then deleted in a thread

Nothing is removed for a checkpoint that a power cut could still destroy. Only completed checkpoints are ever deleted.
Damaged and partial ones are kept for whoever investigates, links and directories with custom names because somebody
made them on purpose, and everything newer than the checkpoint just committed because a run that went back has not
reached it again. Data state, manifest and ledger line outlive the weights: `trace` and `verify` need no weights.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megaresume.checkpoint.lock.lock import check_owned
from megaresume.checkpoint.records.branches import abandoned_checkpoints, saves_given_up
from megaresume.checkpoint.records.candidates import Candidate, examine, find, list_candidates, resolve_pointer
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.manifest import read_manifest
from megaresume.checkpoint.records.marker import read_marker, remove_marker
from megaresume.checkpoint.records.names import (
    is_usual_tag,
    ledger_path,
    manifest_path,
    marker_path,
    older_dir,
    parse_older_name,
    rank_dirs,
    records_dir,
    step_path,
    superseded_path,
)
from megaresume.checkpoint.records.pointers import read_pointers
from megaresume.checkpoint.records.step_file import StepFile, read_step_file
from megaresume.files import delete_soon, fsync_dir, leftover_name, make_dir, write_atomic, write_error
from megaresume.stream.errors import MegaresumeError, NewerFormatError, StateError, UsageError

#: held while the records of a step are moved: in the meantime, a thread may find its checkpoint durable.
changing = threading.Lock()


def make_room(root: Path, iteration: int, tag: str) -> None:
    """Move an older save of the same step aside, or delete the leftovers of an unfinished one.

    On rank 0, as the owner of the root, before `begin_save`; does nothing without a tag directory.

    Raises:
        CheckpointError: a write fails, or the root has another owner by now.
        NewerFormatError: a record was written by a newer megaresume.
    """
    if not os.path.lexists(root / tag):
        return
    check_owned(root)
    with changing:
        _make_room(root, iteration, tag)


def _make_room(root: Path, iteration: int, tag: str) -> None:
    manifest, aside = manifest_path(root, iteration, tag), older_dir(root, iteration, tag)
    places = [step_path(root, iteration, tag), *rank_dirs(root, iteration, tag), root / tag]
    if _did_not_end(root, iteration, tag):
        _discard([manifest, *places])
        return
    if manifest.exists():
        _discard([aside])
    make_dir(aside / records_dir(root).name)
    _move([manifest], root, aside)
    if manifest.exists():
        _discard([manifest])
    _move(places, root, aside)


def _did_not_end(root: Path, iteration: int, tag: str) -> bool:
    """Whether the existing files were left by an unfinished save."""
    candidate = find(root, iteration, tag)
    if candidate is None or "saving" not in candidate.records:
        return False
    return not candidate.is_committed or examine(root, candidate).status == "incomplete"


def remove_older(root: Path, iteration: int, tag: str) -> None:
    """Remove the older save of a step after the new one is durable: renamed at once, deleted in a thread.

    Raises:
        CheckpointError: a write fails.
    """
    _discard([older_dir(root, iteration, tag)])


def has_older(root: Path) -> bool:
    """Whether `put_back` has anything to do. Only reads."""
    try:
        return any(parse_older_name(name) is not None for name in os.listdir(root))
    except OSError:
        return False


def put_back(root: Path) -> tuple[str, ...]:
    """Undo every `make_room` whose new save is not valid. On rank 0, as the owner of the root, between saves.

    Returns:
        the restored tags.

    Raises:
        CheckpointError: a write fails.
        NewerFormatError: a record was written by a newer megaresume.
    """
    back: list[str] = []
    for name in sorted(os.listdir(root)) if has_older(root) else ():
        if (parsed := parse_older_name(name)) is None:
            continue
        iteration, tag = parsed
        aside = root / name
        candidate = find(root, iteration, tag)
        found = None if candidate is None else examine(root, candidate)
        if not any(files for _, _, files in os.walk(aside)):
            _discard([aside])
        elif found is not None and found.manifest is not None and found.is_settled:
            if found.manifest.durable:
                _discard([aside])
        else:
            _put_back(root, aside, iteration, tag)
            back.append(tag)
    return tuple(back)


def _put_back(root: Path, aside: Path, iteration: int, tag: str) -> None:
    manifest = manifest_path(root, iteration, tag)
    places = [root / tag, step_path(root, iteration, tag), *rank_dirs(root, iteration, tag)]
    if os.path.lexists(aside / tag):
        # It was moved last and comes back first: everything in its place belongs to the unfinished save.
        _discard([manifest, *places])
    _move([aside / place.relative_to(root) for place in places], aside, root)
    remove_marker(marker_path(root, iteration, tag))
    _move([aside / manifest.relative_to(root)], aside, root)
    _discard([aside])


def _move(places: Iterable[Path], source: Path, target: Path) -> None:
    """Move those of these paths that exist from ``source`` to ``target``, durably. Files are small, and copied first:
    after a power cut they are in at least one of the two.
    """
    for place in places:
        to = target / place.relative_to(source)
        try:
            if place.is_file() and not place.is_symlink():
                _copy(place, to)
            elif os.path.lexists(place):
                os.rename(place, to)
                fsync_dir(to.parent)
                fsync_dir(place.parent)
        except OSError as error:
            raise write_error(place, error) from error


def _copy(file: Path, to: Path) -> None:
    """Copy a file, as a hard link if the filesystem supports that: there may be no space for more."""
    temporary = to.with_name(leftover_name(to.name))
    try:
        os.link(file, temporary)
    except OSError:
        write_atomic(to, file.read_bytes())
        return
    os.replace(temporary, to)
    temporary.unlink(missing_ok=True)  # renaming changes nothing if both names are links to the same file
    fsync_dir(to.parent)


def _discard(places: Iterable[Path]) -> None:
    """Rename these paths out of sight, durably, and delete them in a thread."""
    gone: list[Path] = []
    for place in places:
        if os.path.lexists(place):
            away = place.with_name(leftover_name(place.name))
            try:
                os.rename(place, away)
                fsync_dir(place.parent)
            except FileNotFoundError:  # the thread that finds a save durable was faster
                continue
            except OSError as error:
                raise write_error(place, error) from error
            gone.append(away)
    delete_soon(gone)


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Which checkpoints are kept: those selected by either rule; without a rule, all.

    Args:
        keep_last: number of newest durable ones.
        keep_every: those whose iteration is divisible by this.

    Raises:
        UsageError: a number below 1.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if value is not None and value < 1:
                raise UsageError(
                    f"{name} must be at least 1",
                    found=f"{name}={value}",
                    expected="checkpoints" if name == "keep_last" else "iterations",
                    action=f"leave out {name} (--megaresume-{name.replace('_', '-')}) to keep all checkpoints",
                )

    def __bool__(self) -> bool:
        return self.keep_last is not None or self.keep_every is not None


#: delete nothing.
KEEP_ALL = Retention()


def prune(
    root: Path,
    retention: Retention,
    committed: StepFile,
    *,
    copied_to: Path | None = None,
    copies_of: Path | None = None,
) -> tuple[str, ...]:
    """Delete what a policy does not keep. On rank 0, when the checkpoint ``committed`` is durable.

    A directory disappears by one rename and is deleted by a thread, which the interpreter waits for when it exits;
    remnants after a kill have the name of a temporary file, and the next start deletes them.

    Args:
        root: the checkpoint root.
        retention: the policy. ``keep_every`` alone also keeps the newest one.
        committed: the checkpoint that is now durable.
        copied_to: only delete what has a complete copy there, or will never get one, on an abandoned branch; None: no
            condition.
        copies_of: keep what still exists there; None: no condition.

    Returns:
        the deleted tags, newest first.

    Never raises: a checkpoint that cannot be deleted is logged. The training does not depend on it.
    """
    if not retention:
        return ()
    gone: list[str] = []
    doomed: list[Path] = []
    given_up: frozenset[str] | None = None
    try:
        check_owned(root)
        for candidate in superfluous(root, retention, committed):
            if copied_to is not None and not is_copied(root, copied_to, candidate.iteration, candidate.tag):
                given_up = saves_given_up(root) if given_up is None else given_up
                if _save_of(root, candidate) not in given_up:
                    continue
            if copies_of is not None and (copies_of / candidate.tag).is_dir():
                continue
            place = root / candidate.tag
            away = place.with_name(leftover_name(candidate.tag))
            try:
                os.rename(place, away)
            except OSError as error:
                log.warning("megaresume: cannot delete the old checkpoint %s: %s", place, error)
                continue
            gone.append(candidate.tag)
            doomed.append(away)
    except (MegaresumeError, OSError) as error:
        log.warning("megaresume: old checkpoints are kept: %s", error)
    delete_soon(doomed)
    return tuple(gone)


def _save_of(root: Path, candidate: Candidate) -> str:
    assert candidate.iteration is not None
    return read_step_file(step_path(root, candidate.iteration, candidate.tag)).save_id


def superfluous(root: Path, retention: Retention, committed: StepFile) -> Iterator[Candidate]:
    """The checkpoints that no rule keeps, newest first; none without a rule."""
    if not retention:
        return
    candidates = list_candidates(root)
    named = {resolve_pointer(pointer, candidates) for pointer in read_pointers(root)}
    # What a run that went back left behind is no fallback for its present: it must not take the place of one.
    given_up = abandoned_checkpoints(read_ledger(ledger_path(root)).entries)
    durable = 0
    for candidate in candidates:
        iteration, tag = candidate.iteration, candidate.tag
        if not candidate.has_dir or iteration is None or iteration > committed.iteration:
            continue
        # In progress (another save's finalizer), made by the user, or never committed.
        if "saving" in candidate.records or not candidate.is_committed or not is_usual_tag(tag, iteration):
            continue
        every = retention.keep_every is not None and iteration % retention.keep_every == 0
        is_enough = durable >= (retention.keep_last or 1)
        if (every or candidate in named or os.path.islink(root / tag)) and is_enough:
            continue
        examined = examine(root, candidate, run=committed.run)
        if not examined.is_settled or examined.manifest is None:
            continue
        durable += examined.manifest.durable and (iteration, tag) not in given_up
        if is_enough:
            yield candidate


def is_copied(local: Path, shared: Path, iteration: int | None, tag: str) -> bool:
    """Whether the copy of a checkpoint was completed: the same save, with a manifest, every file with its size."""
    if iteration is None:
        return False
    try:
        ours = read_manifest(manifest_path(local, iteration, tag), iteration=iteration, tag=tag)
        copied = read_manifest(manifest_path(shared, iteration, tag), iteration=iteration, tag=tag)
        marker = read_marker(marker_path(shared, iteration, tag))
    except MegaresumeError:
        return False
    return ours.save_id == copied.save_id and marker is None and not copied.verify(shared / tag)


def keep_superseded(root: Path, record: StepFile) -> tuple[str, ...]:
    """Copy the state of the same step if it is for other data: a step's history is never lost silently."""
    path = step_path(root, record.iteration, record.tag)
    if (aside := older_dir(root, record.iteration, record.tag) / path.relative_to(root)).exists():
        path = aside
    if not path.exists():
        return ()
    try:
        old = read_step_file(path)
        digest, what = old.state.digest, f"digest {old.state.digest}, saved {old.saved_at}"
        if digest == record.state.digest and old.tag == record.tag:
            return ()
    except NewerFormatError:
        raise
    except StateError as error:
        digest, what = "unreadable", f"an unreadable state ({error.headline})"
    keep = superseded_path(root, record.iteration, record.tag, digest)
    make_dir(keep.parent)
    try:
        write_atomic(keep, path.read_bytes(), drafts=records_dir(root))
    except OSError as error:
        raise write_error(keep, error) from error
    return (
        f"iteration {record.iteration} was committed before with other data: {what}; now digest {record.state.digest}. "
        f"The old state is kept as {keep.relative_to(root)}",
    )
