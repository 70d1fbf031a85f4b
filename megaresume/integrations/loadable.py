"""What a DeepSpeed checkpoint must be to be loaded: rules on its records alone, without torch.

`megaresume plan` asks them before any rank is started, `megaresume.integrations.deepspeed_host` on the ranks.
"""

from __future__ import annotations

from pathlib import Path

from megaresume.checkpoint.choose import Choice, choose, choose_of_two
from megaresume.checkpoint.topology import Topology
from megaresume.integrations.elastic.universal import read_universal
from megaresume.stream.errors import CheckpointError, StateError

__all__ = [
    "BEGIN_ANEW",
    "check_convertible",
    "check_zero",
    "choose_to_load",
    "other_partitions",
    "refuse_partitions",
    "without_state",
]

#: how to load weights without their data.
BEGIN_ANEW = (
    "megaresume.attach(..., checkpoints=Checkpoints(adopt=True)); or the weights alone: "
    "load_checkpoint(..., load_module_only=True)"
)


def choose_to_load(
    load_dir: str, tag: str | None, universal: bool, *, checksums: bool = False, shared: Path | None = None
) -> Choice | None:
    """Decide what to load; on one rank.

    Args:
        load_dir: the checkpoint root.
        tag: exactly this one; None: the newest complete one.
        universal: take what ``latest_universal`` names.
        checksums: read every file, and compare its checksum; a universal checkpoint has none.
        shared: where the copies of this root are; no matter for a universal checkpoint.

    Raises:
        CheckpointError: what was asked for is not whole, or nothing is.
    """
    if not universal and shared is not None:
        return choose_of_two(load_dir, shared, tag=tag, checksums=checksums)
    if not universal or tag is not None:
        return choose(load_dir, tag=tag, checksums=checksums)
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


def other_partitions(before: Topology | None, *, partitions: int, zero_stage: int) -> bool:
    """Whether ZeRO's optimizer state was divided over another number of ranks: DeepSpeed would fail on it obscurely,
    or not notice at all.

    Args:
        before: how the run was laid out when it saved; None: not known.
        partitions: ranks over which ZeRO divides the optimizer state now: data-parallel times context-parallel.
        zero_stage: now.
    """
    if before is None or before.zero_stage is None:
        return False
    return before.dp * before.cp != partitions and max(before.zero_stage, zero_stage) > 0


def check_zero(
    choice: Choice, before: Topology | None, *, partitions: int, zero_stage: int, universal: bool, elastic: bool = False
) -> None:
    """Raise a CheckpointError where an engine could not load the optimizer state: it was divided over another number
    of ranks, there is no conversion beside it, and none will be made.

    Args:
        choice: what is to be loaded.
        before, partitions, zero_stage: see `other_partitions`.
        universal: load_universal is set.
        elastic: the job will convert it.
    """
    if universal or not other_partitions(before, partitions=partitions, zero_stage=zero_stage):
        return
    assert before is not None
    if choice.step is not None and read_universal(choice.tag_dir, choice.step.save_id) is not None:
        return
    check_convertible(choice.tag_dir, before, partitions=partitions, zero_stage=zero_stage)
    if not elastic:
        raise refuse_partitions(choice.tag_dir, before, partitions=partitions, zero_stage=zero_stage)


def check_convertible(source: Path, before: Topology, *, partitions: int, zero_stage: int) -> None:
    """Raise a CheckpointError where a universal checkpoint would not help either.

    Args:
        source: the tag directory.
        before, partitions, zero_stage: see `other_partitions`.
    """
    stage = before.zero_stage or 0
    if stage and zero_stage and (stage == 3) == (zero_stage == 3):
        return
    error = refuse_partitions(source, before, partitions=partitions, zero_stage=zero_stage)
    error.expected = f"{before.dp * before.cp} data-parallel ranks, or ZeRO " + (
        "3" if stage == 3 else "1 or 2" if stage else "0"
    )
    error.cause = "both the number of ranks and the kind of ZeRO changed; DeepSpeed can convert for only one of them"
    error.action = f"start with ZeRO {stage} on any number of ranks, or on {before.dp * before.cp} data-parallel ranks"
    raise error


def refuse_partitions(source: Path, before: Topology, *, partitions: int, zero_stage: int) -> CheckpointError:
    """The error for a checkpoint that needs a conversion, with the command. Arguments as of `check_convertible`."""
    saved = before.dp * before.cp
    return CheckpointError(
        "DeepSpeed cannot load ZeRO optimizer state on another number of data-parallel ranks",
        found=f"{source.name}, saved with ZeRO {before.zero_stage} on {saved} data-parallel ranks; "
        f"{partitions} now, with ZeRO {zero_stage}",
        expected=f"{saved} data-parallel ranks, or a universal checkpoint",
        cause="the job was started on another number of nodes or GPUs",
        action=f"megaresume convert {source.parent} --tag {source.name}, and start again as you did; or let the job "
        "do it: attach(..., checkpoints=Checkpoints(elastic=True)), --megaresume-elastic. The data needs no conversion",
    )


def without_state(choice: Choice, begin_anew: str) -> StateError:
    """The error for a checkpoint whose data is unknown.

    Args:
        begin_anew: how to load it all the same.
    """
    return StateError(
        "the checkpoint has no data state",
        found=f"{choice.tag_dir}, written without megaresume",
        expected=f"the records of it in {choice.load_dir}/megaresume",
        cause="it was saved before megaresume was added, or the directory megaresume was not copied along",
        action=f"copy the directory megaresume as well; or go on without it: {begin_anew}",
    )
