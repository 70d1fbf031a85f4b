"""One tag directory of a DeepSpeed engine: written and committed, chosen and checked.

DeepSpeed's own ``latest`` is no commit marker: its rank 0 writes it, in place, while other ranks may still be writing
their files. So it is told not to, and the commit writes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaresume.checkpoint.choose import Choice
from megaresume.checkpoint.commit import begin_save, commit_save
from megaresume.checkpoint.confirm import confirm_choice
from megaresume.checkpoint.data_file import write_data_file
from megaresume.checkpoint.manifest import FileEntry
from megaresume.checkpoint.state_file import StepFile
from megaresume.checkpoint.topology import Topology
from megaresume.integrations import deepspeed_engine as facts
from megaresume.integrations.loadable import check_zero, choose_to_load, without_state
from megaresume.integrations.ranks import gather, is_rank_0, on_all_ranks, on_rank_0
from megaresume.stream.errors import CheckpointError, StateError
from megaresume.stream.state import StreamState

__all__ = [
    "KEY",
    "check_loaded",
    "check_partitions",
    "choose_tag",
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
    write_beside: Callable[[], tuple[FileEntry, ...]] | None = None,
) -> Any:
    """Write a tag directory with ``write`` (DeepSpeed's method, save_dir bound) and commit it. On all ranks.

    ``write_beside`` writes what this rank has to add in ``<save>/megaresume``, and returns what all ranks add there.

    Raises, on every rank:
        CheckpointError: files are missing or empty, or the disk refuses. The pointers stay as they were.
    """
    begin = on_rank_0(
        lambda: begin_save(
            save_dir,
            tag=tag,
            iteration=iteration,
            state=state,
            topology=topology(),
            latest=latest,
            tracker=latest,
        )
    )
    beside = () if write_beside is None else on_all_ranks(write_beside)
    result = write(tag=tag, client_state={**client_state, KEY: state.to_dict()}, save_latest=False)
    files = written_files(engine, save_dir, tag)

    def commit() -> tuple[str, ...]:
        notes = commit_save(begin, expected_files=files, beside=beside).notes
        if origin is not None:
            write_data_file(Path(save_dir), origin)
        return notes

    on_rank_0(commit)
    return result


def choose_tag(load_dir: str, tag: str | None, universal: bool) -> tuple[Choice | None, StepFile | None]:
    """Rank 0 decides what to load; all ranks see the same there. Also a barrier: no rank may begin to load what
    another refuses.

    Args:
        load_dir: the checkpoint root.
        tag: exactly this one; None: the newest complete one.
        universal: take what ``latest_universal`` names.

    Returns:
        the choice, and the record beside it; None where there is no checkpoint at all.

    Raises, on every rank:
        CheckpointError: what was asked for is not whole, nothing is, or the ranks see different directories.
    """
    choice = on_rank_0(lambda: choose_to_load(load_dir, tag, universal))
    step_file = on_all_ranks(lambda: confirm_choice(load_dir, None if choice is None else choice.to_broadcast()))
    if choice is not None and is_rank_0():
        for rejected in choice.rejected:
            log.warning("megaresume: passed over %s", rejected)
        for note in choice.notes:
            log.warning("megaresume: %s", note)
    return choice, step_file


def check_partitions(engine: Any, choice: Choice, step_file: StepFile | None, universal: bool) -> None:
    """Raise a CheckpointError where this engine cannot load the optimizer state: see `check_zero`."""
    check_zero(
        choice.tag_dir,
        None if step_file is None else step_file.topology,
        partitions=facts.partitions(engine),
        zero_stage=int(engine.zero_optimization_stage()),
        universal=universal,
    )


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
