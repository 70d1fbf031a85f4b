"""What loading does about ZeRO's partitions: nothing, take the conversion that is there, make one, or refuse.

prepare_load     before the model is built: rank 0 looks and converts, or every rank refuses; no GPU memory is used
conversion       within load_checkpoint, where the engine says what it is; the same decision
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from megaresume.checkpoint.choose import Choice
from megaresume.checkpoint.step_file import StepFile
from megaresume.integrations.elastic.convert import Reporter, convert
from megaresume.integrations.elastic.universal import read_universal
from megaresume.integrations.elastic.waiting import on_rank_0_for_long
from megaresume.integrations.loadable import check_convertible, choose_to_load, other_partitions, refuse_partitions
from megaresume.integrations.ranks import on_all_ranks
from megaresume.stream.errors import CheckpointError

__all__ = ["conversion", "prepare_load"]


def prepare_load(
    load_dir: str | os.PathLike[str],
    *,
    zero_stage: int,
    partitions: int | None = None,
    tag: str | None = None,
    elastic: bool = False,
) -> None:
    """See to it that the checkpoint which ``load_checkpoint`` will take can be loaded by this number of ranks.

    Call it on every rank before the model is built: what is refused here is refused before any GPU memory is used,
    and a conversion leaves the GPUs to nobody else's model. An empty directory is fine.

    Args:
        load_dir: the checkpoint root.
        zero_stage: of the engine to come.
        partitions: ranks over which it will divide the optimizer state, data-parallel times context-parallel; None:
            all ranks.
        tag: exactly this checkpoint; None: the newest complete one.
        elastic: convert by itself where that is needed.

    Raises, on every rank:
        CheckpointError: nothing whole is there, or another number of ranks saved it and ``elastic`` is not set, with
            the command to run; or the conversion fails.
    """
    count = partitions or (dist.get_world_size() if dist.is_initialized() else 1)

    def look(beat: Callable[[], None]) -> None:
        choice = choose_to_load(os.fspath(load_dir), tag, False)
        if choice is not None and choice.step is not None:
            _settle(choice, choice.step, count, zero_stage, elastic, beat)

    on_rank_0_for_long(look)


def conversion(
    choice: Choice, step_file: StepFile | None, *, partitions: int, zero_stage: int, elastic: bool
) -> str | None:
    """The tag of the universal checkpoint to load in the place of the chosen one; None: that one loads as it is.

    Args:
        choice: what is to be loaded, the same on every rank.
        step_file: its record, as this rank read it.
        partitions: ranks over which the engine divides the optimizer state.
        zero_stage: the engine's.
        elastic: convert by itself where that is needed.

    Raises, on every rank: as `prepare_load`; or a rank does not see the conversion.
    """
    if step_file is None or not other_partitions(step_file.topology, partitions=partitions, zero_stage=zero_stage):
        return None
    tag = on_rank_0_for_long(lambda beat: _settle(choice, step_file, partitions, zero_stage, elastic, beat))
    on_all_ranks(lambda: _wait_for(choice.tag_dir, step_file.save_id))
    return tag


def _settle(
    choice: Choice, step: StepFile, partitions: int, zero_stage: int, elastic: bool, beat: Callable[[], None]
) -> str | None:
    """On rank 0."""
    before = step.topology
    if not other_partitions(before, partitions=partitions, zero_stage=zero_stage):
        return None
    there = read_universal(choice.tag_dir, step.save_id)
    if there is None:
        check_convertible(choice.tag_dir, before, partitions=partitions, zero_stage=zero_stage)
        if not elastic:
            raise refuse_partitions(choice.tag_dir, before, partitions=partitions, zero_stage=zero_stage)
        there = convert(choice.tag_dir, save_id=step.save_id, made_by="job", report=Reporter(say=_say, beat=beat))
    return there.path.name


def _say(words: str) -> None:
    # Printed, not logged: it explains why a job stands still, whatever the program does with its logging.
    print(f"megaresume: {words}", flush=True)


def _wait_for(tag_dir: Path, save_id: str, timeout_seconds: float = 30.0) -> None:
    """Caches of shared filesystems lag behind."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            if read_universal(tag_dir, save_id) is not None:
                return
            problem = "there is none"
        except CheckpointError as error:
            problem = str(error.found)
        if time.monotonic() >= deadline:
            raise CheckpointError(
                "this rank does not see the universal checkpoint",
                found=f"on {os.uname().nodename}, beside {tag_dir}: {problem}",
                expected="what rank 0 sees there",
                cause="the directory is not on a filesystem that all nodes share, or a cache lags behind",
                action="mount the same directory on every node; then start again",
            )
        time.sleep(0.5)
