"""One tag directory of a DeepSpeed engine: written and committed, chosen and checked.

DeepSpeed's own ``latest`` is no commit marker: its rank 0 writes it, in place, while other ranks may still be writing
their files. So it is told not to, and the commit writes it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaresume.checkpoint.choose import Choice
from megaresume.checkpoint.commit import PendingCheckpoint, begin_save, commit_save
from megaresume.checkpoint.confirm import confirm_choice
from megaresume.checkpoint.data_file import write_data_file
from megaresume.checkpoint.lock import take
from megaresume.checkpoint.manifest import FileEntry
from megaresume.checkpoint.retention import KEEP_ALL, Retention
from megaresume.checkpoint.state_file import StepFile
from megaresume.checkpoint.topology import Topology
from megaresume.integrations import deepspeed_engine as facts
from megaresume.integrations import in_flight
from megaresume.integrations.elastic.load import conversion
from megaresume.integrations.elastic.restore import check_restorable, restore_rest
from megaresume.integrations.elastic.universal import remove_converted
from megaresume.integrations.explained import reading, writing
from megaresume.integrations.loadable import choose_to_load, without_state
from megaresume.integrations.ranks import gather, is_rank_0, on_all_ranks, on_rank_0, written_by_all
from megaresume.stream.errors import CheckpointError, StateError
from megaresume.stream.state import StreamState

__all__ = [
    "KEY",
    "choose_tag",
    "read_tag",
    "state_within",
    "without_state",
    "write_tag",
    "written_files",
]

#: the one key that we add to DeepSpeed's client state, which shares a namespace with DeepSpeed's own.
KEY = "megaresume"

log = logging.getLogger(__name__)


def written_files(engine: Any, save_dir: str, tag: str) -> list[str]:
    """What all ranks write into the tag directory. A collective: also the barrier behind the last write."""
    return sorted({file for files in gather(facts.expected_files(engine, save_dir, tag)) for file in files})


def write_tag(
    engine: Any,
    write: Callable[..., Any],
    save_dir: str,
    *,
    tag: str,
    iteration: int,
    state: StreamState,
    topology: Callable[[], Topology],
    client_state: Mapping[str, Any],
    latest: bool,
    origin: Mapping[str, Any] | None,
    write_beside: Callable[[], Sequence[FileEntry]] = tuple,
    retention: Retention = KEEP_ALL,
    checksums: bool = False,
    committed: Callable[[], None] | None = None,
) -> Any:
    """Write a tag directory with ``write`` (DeepSpeed's method, save_dir bound) and commit it. On all ranks. Where
    DeepSpeed writes in the background, the commit follows when it is done: see `in_flight`.

    ``write_beside`` writes what this rank has to add in ``<save>/megaresume``, and returns what it wrote.
    ``checksums``: rank 0 reads every file and puts its checksum into the manifest.
    ``committed``: called on rank 0 behind the commit.

    Raises, on every rank:
        CheckpointError: files are missing or empty, another job writes there, or the disk refuses. The pointers stay as
            they were.
    """
    in_flight.watch(engine)
    in_flight.settle(engine)
    on_all_ranks(lambda: in_flight.check_writer(engine))

    def announce() -> PendingCheckpoint:
        take(save_dir)  # held since the start, unless the data was closed meanwhile
        return begin_save(
            save_dir,
            tag=tag,
            iteration=iteration,
            state=state,
            topology=topology(),
            latest=latest,
            tracker=latest,
            retention=retention,
        )

    begin = on_rank_0(announce)
    beside = written_by_all(write_beside)
    with writing(Path(save_dir, tag)):
        result = write(tag=tag, client_state={**client_state, KEY: state.to_dict()}, save_latest=False)
    files = written_files(engine, save_dir, tag)

    def commit() -> tuple[str, ...]:
        notes = commit_save(begin, expected_files=files, beside=beside, checksums=checksums).notes
        if origin is not None:
            write_data_file(Path(save_dir), origin)
        if latest:
            remove_converted(Path(save_dir))
        if committed is not None:
            committed()
        return notes

    if facts.is_decoupled(engine):
        in_flight.defer(engine, begin, commit)
    else:
        on_rank_0(commit)
    return result


def choose_tag(
    load_dir: str, tag: str | None, universal: bool, *, checksums: bool = False, shared: Path | None = None
) -> tuple[Choice | None, StepFile | None]:
    """Rank 0 decides what to load; all ranks see the same there. Also a barrier: no rank may begin to load what
    another refuses.

    Args:
        load_dir: the checkpoint root.
        tag: exactly this one; None: the newest complete one.
        universal: take what ``latest_universal`` names.
        checksums: rank 0 reads every file and compares its checksum, where the save took one.
        shared: where the copies of this root are: see `megaresume.checkpoint.two_roots`.

    Returns:
        the choice, its directory as this rank knows it, and the record beside it; None where there is no checkpoint at
        all.

    Raises, on every rank:
        CheckpointError: what was asked for is not whole, nothing is, or the ranks see different directories.
    """
    roots = [Path(os.path.abspath(root)) for root in (load_dir, shared) if root is not None]

    def decide() -> tuple[Choice | None, int]:
        choice = choose_to_load(load_dir, tag, universal, checksums=checksums, shared=shared)
        return choice, 0 if choice is None else roots.index(choice.load_dir)

    choice, root = on_rank_0(decide)
    if choice is not None:
        # Each rank looks where it would read itself: its path may be another mount, or show what rank 0's does not.
        choice = dataclasses.replace(choice, load_dir=roots[root])
    broadcast = None if choice is None else choice.to_broadcast()
    step_file = on_all_ranks(lambda: confirm_choice(roots[root], broadcast))
    if choice is not None and is_rank_0():
        for rejected in choice.rejected:
            log.warning("megaresume: passed over %s", rejected)
        for note in choice.notes:
            log.warning("megaresume: %s", note)
        if checksums and choice.manifest is not None and not choice.manifest.has_checksums:
            log.warning("megaresume: %s was saved without checksums: only sizes could be compared", choice.tag)
    return choice, step_file


def read_tag(
    engine: Any,
    read: Callable[..., tuple[Any, Any]],
    choice: Choice,
    step_file: StepFile | None,
    *,
    elastic: bool,
    optimizer: bool = True,
) -> tuple[Choice, Any, Any]:
    """Read what was chosen with ``read`` (DeepSpeed's method), or its universal form, where another number of ranks
    saved it. On all ranks.

    Args:
        engine: the engine.
        read: takes the directory and the tag.
        choice, step_file: of `choose_tag`.
        elastic: convert by itself where that is needed.
        optimizer: whether the optimizer's state is asked for; weights alone load on any number of ranks.

    Returns:
        what was read, DeepSpeed's path and client state.

    Raises, on every rank:
        CheckpointError: see `elastic.load.conversion`; or DeepSpeed did not load it.
    """
    tag = None
    if optimizer and not facts.loads_universal(engine):
        tag = conversion(
            choice,
            step_file,
            partitions=facts.partitions(engine),
            zero_stage=facts.zero_stage(engine),
            elastic=elastic,
        )
    if tag is None:
        with reading(choice):
            path, client_state = read(choice.load_dir, tag=choice.tag)
        on_all_ranks(lambda: check_loaded(path, choice))
        return choice, path, client_state
    on_all_ranks(lambda: check_restorable(engine))
    choice = dataclasses.replace(choice, tag=tag)
    with facts.as_universal(engine):
        path, client_state = read(choice.load_dir, tag=tag)
    on_all_ranks(lambda: check_loaded(path, choice))
    on_all_ranks(lambda: restore_rest(engine, choice.tag_dir))
    return choice, path, client_state


def check_loaded(path: object, choice: Choice) -> None:
    """Raise a CheckpointError where DeepSpeed did not load what was chosen, which it says by returning None."""
    if path is None:
        raise CheckpointError(
            "DeepSpeed did not load the checkpoint",
            found=f"load_checkpoint returned None for {choice.tag_dir}",
            expected="the path of the checkpoint",
            cause="files that DeepSpeed needs are missing, or of another parallel layout",
            action=f"megaresume inspect {choice.load_dir}",
        )


def state_within(
    choice: Choice, step_file: StepFile | None, client_state: Mapping[str, Any] | None, begin_anew: str
) -> StreamState:
    """The state that rides with the weights, which must be the one that lies beside them.

    Raises:
        StateError: there is none, or another one.
    """
    within = (client_state or {}).get(KEY)
    if within is None:
        raise without_state(choice, begin_anew)
    state = StreamState.from_json(within)
    if step_file is not None and step_file.state != state:
        raise StateError(
            "the data state in the checkpoint is not the one beside it",
            found=f"within: sample {state.samples}, digest {state.digest}",
            expected=f"beside: sample {step_file.state.samples}, digest {step_file.state.digest}",
            cause="a tag directory was copied over another one, or its records were",
            action=f"megaresume inspect {choice.load_dir}; load a checkpoint that is whole",
        )
    return state
