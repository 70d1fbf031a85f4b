"""What a DeepSpeed checkpoint must be to be loaded: rules on its records alone, without torch.

`megaresume plan` asks them before any rank is started, `megaresume.integrations.deepspeed_tags` on the ranks.
"""

from __future__ import annotations

from pathlib import Path

from megaresume.checkpoint.choose import Choice, choose
from megaresume.checkpoint.topology import Topology
from megaresume.stream.errors import CheckpointError, StateError

__all__ = ["BEGIN_ANEW", "check_zero", "choose_to_load", "without_state"]

#: how to load weights without their data.
BEGIN_ANEW = "load_checkpoint(..., load_module_only=True)"


def choose_to_load(load_dir: str, tag: str | None, universal: bool) -> Choice | None:
    """Decide what to load; on one rank.

    Args:
        load_dir: the checkpoint root.
        tag: exactly this one; None: the newest complete one.
        universal: take what ``latest_universal`` names.

    Raises:
        CheckpointError: what was asked for is not whole, or nothing is.
    """
    if not universal or tag is not None:
        return choose(load_dir, tag=tag)
    pointer = Path(load_dir, "latest_universal")
    try:
        tag = pointer.read_text().strip()
    except OSError as error:
        raise CheckpointError(
            "load_universal is set, but there is no universal checkpoint",
            found=f"{pointer}: {error.strerror}",
            expected="the name of a directory that ds_to_universal wrote",
            action="convert one with deepspeed.checkpoint.ds_to_universal, or remove load_universal",
        ) from error
    choice, newest = choose(load_dir, tag=tag), choose(load_dir)
    if choice is not None and newest is not None and (newest.iteration or 0) > (choice.iteration or 0):
        raise CheckpointError(
            "the universal checkpoint is older than the newest checkpoint",
            found=f"{tag}, and {newest.tag} beside it",
            expected="the newest one, so that no step is trained twice",
            cause="load_universal was left in the config after the resume that needed it",
            action="remove load_universal (--universal-checkpoint); or convert the newest one; or, to go back on "
            f"purpose, ask for tag {tag}",
        )
    return choice


def check_zero(source: Path, before: Topology | None, *, partitions: int, zero_stage: int, universal: bool) -> None:
    """Raise a CheckpointError where ZeRO's optimizer state was divided over another number of ranks: DeepSpeed would
    fail on it obscurely, or not notice at all.

    Args:
        source: the tag directory.
        before: how the run was laid out when it saved; None: not known.
        partitions: ranks over which ZeRO divides the optimizer state now: data-parallel times context-parallel.
        zero_stage: now.
        universal: a universal checkpoint is loaded.
    """
    if before is None or before.zero_stage is None or universal:
        return
    saved = before.dp * before.cp
    if saved != partitions and max(before.zero_stage, zero_stage) > 0:
        raise CheckpointError(
            "DeepSpeed cannot load ZeRO optimizer state on another number of data-parallel ranks",
            found=f"{source.name}, saved with ZeRO {before.zero_stage} on {saved} data-parallel ranks; "
            f"{partitions} now, with ZeRO {zero_stage}",
            expected=f"{saved} data-parallel ranks, or a universal checkpoint",
            cause="the job was started on another number of nodes or GPUs",
            action=f"python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {source} "
            f'--output_folder {source}_universal, then set "checkpoint": {{"load_universal": true}} in the '
            "DeepSpeed config (--universal-checkpoint in Megatron-DeepSpeed and in megaresume.training). The data "
            "needs no conversion",
        )


def without_state(choice: Choice, begin_anew: str) -> StateError:
    """The error for a checkpoint whose data is unknown.

    Args:
        begin_anew: how to load the weights alone.
    """
    return StateError(
        "the checkpoint has no data state",
        found=f"{choice.tag_dir}, written without megaresume",
        expected=f"the records of it in {choice.load_dir}/megaresume",
        cause="it was saved before megaresume was added, or the directory megaresume was not copied along",
        action="copy the directory megaresume as well; or load the weights alone and begin the data anew: "
        + begin_anew,
    )
