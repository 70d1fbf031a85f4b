"""What a DeepSpeed checkpoint must be to be loaded: rules on its records alone, without torch.

`megaresume plan` asks them before any rank is started, `megaresume.hosts.deepspeed.host` on the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from megaresume.checkpoint.choosing.choose import choose, choose_of_two
from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.files import read_file
from megaresume.checkpoint.manifest import Manifest, Progress
from megaresume.checkpoint.topology import Topology
from megaresume.hosts.deepspeed.elastic.conversion import read_universal
from megaresume.stream.errors import CheckpointError

_ZERO_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")

#: how to load weights without their data.
BEGIN_ANEW = (
    "megaresume.attach(..., checkpoints=Checkpoints(adopt=True)); or the weights alone: "
    "load_checkpoint(..., load_module_only=True)"
)


def choose_to_load(
    load_dir: str,
    tag: str | None,
    universal: bool,
    *,
    shared: Path | None = None,
    damaged: Mapping[Path, str] | None = None,
    checksums: bool = False,
    progress: Progress | None = None,
) -> Choice | None:
    """Decide what to load; on one rank.

    Args:
        load_dir: the checkpoint root.
        tag: exactly this one; None: the newest complete one.
        universal: take what ``latest_universal`` names.
        shared: where the copies of this root are; no matter for a universal checkpoint.
        damaged, checksums, progress: see `choose`; a universal checkpoint has none.

    Raises:
        CheckpointError: what was asked for is not whole, or nothing is.
    """
    if not universal and shared is not None:
        return _of_all_ranks(choose_of_two(load_dir, shared, tag=tag, damaged=damaged))
    if not universal or tag is not None:
        found = choose(load_dir, tag=tag, damaged=damaged, checksums=checksums, progress=progress)
        return _of_all_ranks(found)
    pointer = Path(load_dir, "latest_universal")
    try:
        tag = read_file(pointer).decode("utf-8", "backslashreplace").strip()
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


def _of_all_ranks(choice: Choice | None) -> Choice | None:
    if choice is not None and choice.step is not None and choice.manifest is not None:
        check_partitions(choice.tag_dir, choice.manifest, choice.step.topology)
    return choice


def check_partitions(tag_dir: Path, manifest: Manifest, topology: Topology) -> None:
    """Raise a CheckpointError unless ZeRO's optimizer files are those of the ranks that saved the checkpoint."""
    if not topology.zero_stage:
        return
    found: dict[str, set[int]] = {}
    for entry in manifest.files:
        if (match := _ZERO_FILE.fullmatch(entry.path)) is not None:
            found.setdefault(match[2], set()).add(int(match[1]))
    ranks = topology.dp * topology.cp
    for model_rank, partitions in sorted(found.items()):
        if partitions != set(range(ranks)):
            raise CheckpointError(
                f"the optimizer state of {tag_dir.name} is not that of the ranks that saved it",
                found=f"{tag_dir}: of model-parallel rank {model_rank}, data-parallel ranks "
                + ", ".join(map(str, sorted(partitions))),
                expected=f"data-parallel ranks 0 to {ranks - 1}",
                cause="files of two saves of this step, by different numbers of ranks, are in one directory",
                action="load an older checkpoint: ask for its tag",
            )


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
