"""A step that is saved again: the older save makes room, and comes back if the newer one does not get there.

    make_room      before the marker of the new save. Moved into .step_0000010@global_step10.older/, in this order:
                   manifest                  <- from here the step does not count
                   data state (a copy), files of each rank
                   tag directory
    ... the new save, like any other, in a tag directory that holds nothing ...
    remove_older   the new one is durable
    put_back       at the next start, if the new one does not count: everything moves back, in this order:
                   tag directory, data state, files of each rank
                   manifest                  <- from here the step counts again

So a save never writes among the files of an older one, which may be of more ranks, and the older one is there until the
newer one is. What a save has left that did not end is no older save: it is deleted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

from megaresume.checkpoint.choosing.candidates import examine, find
from megaresume.checkpoint.files import delete_soon, fsync_dir, leftover_name, make_dir, write_atomic, write_error
from megaresume.checkpoint.lock import check_owned
from megaresume.checkpoint.paths import (
    manifest_path,
    marker_path,
    older_dir,
    parse_older_name,
    rank_dirs,
    records_dir,
    step_path,
)
from megaresume.checkpoint.step_file import remove_marker

#: held while the records of a step change places: a thread may say meanwhile that its checkpoint is durable.
changing = threading.Lock()


def make_room(root: Path, iteration: int, tag: str) -> None:
    """Move an older save of the step aside, or delete what a save of it has left that did not end.

    On rank 0, as the owner of the root, before `begin_save`; nothing if the tag directory is not there.

    Raises:
        CheckpointError: the disk refuses, or the root has another owner by now.
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
    """Whether what is in place was left by a save that did not end."""
    candidate = find(root, iteration, tag)
    if candidate is None or "saving" not in candidate.records:
        return False
    return not candidate.is_committed or examine(root, candidate).status == "incomplete"


def remove_older(root: Path, iteration: int, tag: str) -> None:
    """The new save is durable. The older one disappears at once, and is deleted in a thread.

    Raises:
        CheckpointError: the disk refuses.
    """
    _discard([older_dir(root, iteration, tag)])


def has_older(root: Path) -> bool:
    """Whether there is anything for `put_back`. Reads only."""
    try:
        return any(parse_older_name(name) is not None for name in os.listdir(root))
    except OSError:
        return False


def put_back(root: Path) -> tuple[str, ...]:
    """Undo every `make_room` whose new save does not count. On rank 0, as the owner of the root, between saves.

    Returns:
        the tags of what is back.

    Raises:
        CheckpointError: the disk refuses.
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
        elif found is not None and found.manifest is not None and found.status == "complete":
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
        # It went aside last and comes back first: everything in place is of the save that did not end.
        _discard([manifest, *places])
    _move([aside / place.relative_to(root) for place in places], aside, root)
    remove_marker(marker_path(root, iteration, tag))
    _move([aside / manifest.relative_to(root)], aside, root)
    _discard([aside])


def _move(places: Iterable[Path], source: Path, target: Path) -> None:
    """Move what is there of these places below ``source`` to the same ones below ``target``, durably. Files are small,
    and copied: they are in one of the two whatever a power cut does."""
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
    """As a second name if the filesystem has such: there may be no room for more."""
    temporary = to.with_name(leftover_name(to.name))
    try:
        os.link(file, temporary)
    except OSError:
        write_atomic(to, file.read_bytes())
        return
    os.replace(temporary, to)
    temporary.unlink(missing_ok=True)  # of the same file under both names, a rename changes nothing
    fsync_dir(to.parent)


def _discard(places: Iterable[Path]) -> None:
    """Rename what is there of these places out of sight, durably, and delete it in a thread."""
    gone: list[Path] = []
    for place in places:
        if os.path.lexists(place):
            away = place.with_name(leftover_name(place.name))
            try:
                os.rename(place, away)
                fsync_dir(place.parent)
            except OSError as error:
                raise write_error(place, error) from error
            gone.append(away)
    delete_soon(gone)
