"""A checkpoint of an object store, brought to the local root: what a start on an empty machine begins with.

    files and records   into megaresume/fetched/<save>/, each checked; a kill leaves what is there to the next try
                        what is here of the same save, a part of it, is not read again
    the ledger          its lines that the local one lacks
    an existing save of the step is moved aside (`retention`)
    marker -> the tag directory, the files of each rank, in one rename each -> data state -> manifest -> pointers
           -> marker removed, what was aside deleted

A kill at any moment leaves the local root as it was, or with this checkpoint. On rank 0, as the owner of both.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from megaresume.checkpoint.copies.places import share_ledger
from megaresume.checkpoint.copies.store_place import StorePlace
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.lock.lock import check_owned, write_latest, write_manifest, write_step_file, write_tracker
from megaresume.checkpoint.records.marker import Marker, remove_marker, write_marker
from megaresume.checkpoint.records.names import TRACKER, data_path, marker_path, rank_dirs, records_dir, step_path
from megaresume.checkpoint.records.pointers import read_pointers
from megaresume.checkpoint.records.step_file import read_step_file
from megaresume.checkpoint.save.retention import make_room, remove_older
from megaresume.checkpoint.store.mirror import file_name, record_name
from megaresume.files import fsync_dir, fsync_file, make_dir, write_atomic, write_error
from megaresume.stream.errors import StateError


def fetch(place: StorePlace, local: Path, choice: Choice, beat: Callable[[], object]) -> None:
    """Bring a checkpoint to the local root.

    Args:
        place: the store, which this process holds.
        local: the root, which this process holds.
        choice: a complete checkpoint of the mirror.
        beat: called whenever something has come.

    Raises:
        NotAsSavedError: the store lacks an object, or gives back other bytes than were saved.
        CheckpointError: the disk refuses.
        SetupError: the store does not answer, or refuses.
    """
    record, manifest = choice.record, choice.manifest
    assert record is not None and manifest is not None
    iteration, tag = record.iteration, record.tag
    aside = records_dir(local) / "fetched" / record.save_id
    files, records = aside / "files", aside / "records"
    make_dir(files)
    make_dir(records)
    _reuse(local, choice, files)
    place.store.download_all(
        [
            *((file_name(tag, record.save_id, e.path), files / e.path, e) for e in manifest.files),
            *((record_name(record.save_id, e.path), records / e.path, e) for e in manifest.beside),
        ],
        beat,
    )
    check_owned(local)
    share_ledger(place.root, local)
    make_room(local, iteration, tag)
    named = read_pointers(place.root)
    latest, tracker = named[0].tag == tag, named[1].iteration == iteration
    if named[1].iteration is not None and not (local / TRACKER).exists():
        tracker = True  # without one Megatron loads nothing
    write_marker(marker_path(local, iteration, tag), Marker.of(record, latest=latest, tracker=tracker))
    try:
        os.rename(files, local / tag)
        for directory in rank_dirs(local, iteration, tag):
            if (records / directory.name).is_dir():
                os.rename(records / directory.name, directory)
        fsync_dir(local)
    except OSError as error:
        raise write_error(local / tag, error) from error
    if data_path(place.root).is_file() and not data_path(local).exists():
        write_atomic(data_path(local), data_path(place.root).read_bytes())
    write_step_file(step_path(local, iteration, tag), record)
    whole = replace(manifest, durable=True, boots=())
    write_manifest(local, whole)
    if latest:
        write_latest(local, tag)
    if tracker:
        write_tracker(local, iteration)
    remove_marker(marker_path(local, iteration, tag))
    remove_older(local, iteration, tag)
    shutil.rmtree(aside.parent, ignore_errors=True)


def _reuse(local: Path, choice: Choice, files: Path) -> None:
    """Let what is here of this very save, of a node whose part it is, be compared in place of being downloaded."""
    record, manifest = choice.record, choice.manifest
    assert record is not None and manifest is not None
    try:
        here = read_step_file(step_path(local, record.iteration, record.tag)).save_id
    except StateError:
        return
    for entry in manifest.files if here == record.save_id else ():
        target = files / entry.path
        make_dir(target.parent)
        with contextlib.suppress(OSError):
            os.link(local / record.tag / entry.path, target)
            with open(target, "rb") as file:
                fsync_file(file.fileno())  # it may be a save that is not durable yet
