"""Downloads a checkpoint from an object store to the local root, so that a start on an empty machine can use it.

    files and records   into megaresume/fetched/<save>/, each verified; after a kill, the next try reuses them
                        files of the same save that are here, as a part of it, are not downloaded again
    the ledger          its lines that the local one lacks
    an existing save of the step is moved aside (`retention`)
    marker -> the tag directory, the files of each rank, each by one rename -> data state -> manifest -> pointers
           -> marker removed, the save moved aside deleted

A kill at any time leaves the local root as it was, or with this checkpoint. On rank 0, as the owner of both.
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
    """Download a checkpoint to the local root.

    Args:
        place: the store, which this process holds.
        local: the root, which this process holds.
        choice: a complete checkpoint of the mirror.
        beat: called whenever data has arrived.

    Raises:
        NotAsSavedError: the store lacks an object, or returns other bytes than were saved.
        CheckpointError: a local file cannot be written.
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
        tracker = True  # without one, Megatron loads nothing
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
    """Reuse local files of this save, in a part left by this node: they are verified instead of being downloaded."""
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
                fsync_file(file.fileno())  # the save may not be durable yet
