"""What a DeepSpeed checkpoint must be to be loaded: rules on its records alone, without torch.

`megaresume plan` asks them before any rank is started, `megaresume.hosts.deepspeed.host` on the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megaresume.checkpoint.choosing.choose import choose, choose_of_two
from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.manifest import Manifest, Progress
from megaresume.checkpoint.topology import Topology
from megaresume.files import read_file
from megaresume.hosts.deepspeed.elastic.conversion import Universal, read_universal
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Partitions:
    """How an engine divides the optimizer state."""

    #: that it is divided over: data-parallel times context-parallel.
    ranks: int
    zero_stage: int

    def differ_from(self, before: Topology | None) -> bool:
        """Whether it was divided over another number of ranks: DeepSpeed would fail on it obscurely, or not notice at
        all. ``before``: how the run was laid out when it saved; None if not known."""
        if before is None or before.zero_stage is None:
            return False
        return before.dp * before.cp != self.ranks and max(before.zero_stage, self.zero_stage) > 0


def check_zero(choice: Choice, now: Partitions, *, elastic: bool, checksums: bool = False) -> Universal | None:
    """Raise a CheckpointError if an engine could not load the optimizer state: it was divided over another number
    of ranks, there is no conversion beside it, and none will be made.

    Args:
        choice: what is to be loaded.
        now: the engine's.
        elastic: the job will convert it.
        checksums: of a conversion, read every file.

    Returns:
        the conversion that is there; None if it is not needed, or is to be made.
    """
    if choice.step is None or not now.differ_from(choice.step.topology):
        return None
    there = read_universal(choice.tag_dir, choice.step.save_id, checksums=checksums)
    if there is None:
        before, source = choice.step.topology, choice.tag_dir
        stage, saved = before.zero_stage or 0, before.dp * before.cp
        error = CheckpointError(
            "DeepSpeed cannot load ZeRO optimizer state on a different number of data-parallel ranks",
            found=f"{source.name}, saved with ZeRO {before.zero_stage} on {saved} data-parallel ranks; "
            f"{now.ranks} now, with ZeRO {now.zero_stage}",
            expected=f"{saved} data-parallel ranks, or a universal checkpoint",
            cause="the job was started on another number of nodes or GPUs",
            action=f"megaresume convert {source.parent} --tag {source.name}, and start again as you did; or let the "
            "job do it: attach(..., checkpoints=Checkpoints(elastic=True)), --megaresume-elastic. The data needs no "
            "conversion",
        )
        if not (stage and now.zero_stage and (stage == 3) == (now.zero_stage == 3)):
            kind = "3" if stage == 3 else "1 or 2" if stage else "0"
            error.expected = f"{saved} data-parallel ranks, or ZeRO {kind}"
            error.cause = (
                "both the number of ranks and the kind of ZeRO changed; DeepSpeed can convert for only one of them"
            )
            error.action = f"start with ZeRO {stage} on any number of ranks, or on {saved} data-parallel ranks"
            raise error
        if not elastic:
            raise error
    return there
