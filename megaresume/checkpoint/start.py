"""The beginning of a run: what the last one left half done is settled, and the start goes into the ledger."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaresume.checkpoint.atomic import make_dir, remove_leftovers
from megaresume.checkpoint.candidates import examine, list_candidates
from megaresume.checkpoint.choose import Choice
from megaresume.checkpoint.clock import process_age, utc
from megaresume.checkpoint.commit import publish, run_of
from megaresume.checkpoint.layout import ledger_path, marker_path, records_dir
from megaresume.checkpoint.ledger import LedgerEntry, append_ledger, read_ledger
from megaresume.checkpoint.marker import read_marker, remove_marker
from megaresume.checkpoint.state_file import new_id
from megaresume.checkpoint.topology import Topology
from megaresume.stream.state import StreamState

__all__ = ["record_start"]


def record_start(
    save_dir: str | os.PathLike[str],
    *,
    iteration: int,
    state: StreamState,
    choice: Choice | None = None,
    topology: Topology | None = None,
    details: Mapping[str, Any] | None = None,
) -> LedgerEntry:
    """Note that training begins here. On rank 0, once, before the first save; nothing else writes at that time.

    A commit that was killed after its manifest is finished if it is what was loaded (pointers, ledger line), and its
    marker is taken away if something else was loaded: it was passed over on purpose. Saves that did not get as far
    keep their marker: their tag directories stay known as incomplete. Temporary files of killed writers are deleted.

    Args:
        save_dir: the checkpoint root that this run will save to; created if need be.
        iteration: optimizer steps done at the start.
        state: the stream as restored, or its beginning.
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
    make_dir(records_dir(root))
    remove_leftovers(root)
    remove_leftovers(records_dir(root))
    _settle(root, choice)
    kept: dict[str, Any] = dict(details or {})
    if (seconds := process_age()) is not None:
        kept["startup_seconds"] = round(seconds, 1)
    if choice is not None and not _same_place(choice.load_dir, root):
        kept["loaded_from"] = {"digest": choice.digest, "run": None if choice.step is None else choice.step.run}
    entry = LedgerEntry(
        kind="start",
        iteration=iteration,
        tag=None if choice is None else choice.tag,
        samples=state.samples,
        digest=state.digest,
        run=run_of(root) or new_id(),
        time=utc(time.time()),
        topology=topology or Topology(),
        details=kept,
    )
    append_ledger(ledger_path(root), entry)
    return entry


def _same_place(first: Path, second: Path) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False


def _settle(root: Path, choice: Choice | None) -> None:
    own = choice if choice is not None and _same_place(choice.load_dir, root) else None
    for candidate in list_candidates(root):
        if "saving" not in candidate.records or candidate.iteration is None:
            continue
        found = examine(root, candidate)
        if found.status != "complete" or found.step is None or found.manifest is None:
            continue
        path = marker_path(root, candidate.iteration, candidate.tag)
        marker = read_marker(path)
        if marker is None:
            continue
        chosen = own is not None and (own.tag, own.iteration) == (candidate.tag, candidate.iteration)
        known = {entry.details.get("save_id") for entry in read_ledger(ledger_path(root)).entries}
        if chosen and found.step.save_id not in known:
            publish(root, found.step, found.manifest, latest=marker.latest, tracker=marker.tracker, seconds=None)
        else:
            remove_marker(path)
