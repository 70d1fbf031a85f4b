"""Rules for loading a DeepSpeed checkpoint, from its records alone, without torch.

Used by `megaresume plan` before any rank is started, and by `megaresume.hosts.deepspeed.host` on the ranks.

ZeRO state of 2 ranks is loaded by 3 if DeepSpeed's universal checkpoint, made once and sealed, is beside it. (The data
needs no conversion at all.)

    global_step4/                     ZeRO state of 2 ranks; the run now has 3
      |  conversion.py                one process, under a lock: room? -> worker, in a separate process
      v
    .global_step4_universal.converting-<random>/     never read; left by a kill, deleted by the next conversion
      |  sealed, then renamed
      v
    global_step4_universal/           loaded by any number of ranks
      |  the next checkpoint is committed
      v
    removed (made by a job), or kept (made by `megaresume convert`)

The seal is a file in the directory: the save that it was made from, every file with its size and checksum, and who
requested it. The directory appears by rename with the seal in it, so that one without a seal is not ours.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from megaresume.checkpoint.load.choose import choose, choose_of_two
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.records.manifest import (
    FileEntry,
    Manifest,
    checksum_files,
    file_entry,
    list_files,
    verify_files,
)
from megaresume.checkpoint.records.sealed import read_record, rows, seal, text
from megaresume.checkpoint.system import Topology
from megaresume.files import delete_soon, leftover_name, read_file
from megaresume.stream.errors import CheckpointError, counted
from megaresume.stream.progress import Progress

#: suffix of a universal checkpoint's name; its seal within it, and the format of that.
SUFFIX = "_universal"
SEAL = "megaresume.json"
FORMAT = "megaresume.universal"
VERSION = 1

#: job: converted while a run was loading; command: by `megaresume convert`.
Maker = Literal["job", "command"]

#: files that only one data-parallel rank reads.
_FILE_OF_RANK = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_[0-9]+_mp_rank_[0-9]+_?(?:optim|model)_states\.pt")
_ZERO_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt")

#: how to load weights without their data.
BEGIN_ANEW = "megaresume.attach(..., adopt=True); or the weights alone: load_checkpoint(..., load_module_only=True)"


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
        universal: use what ``latest_universal`` names.
        shared: where the copies of this root are; ignored for a universal checkpoint.
        damaged, checksums, progress: see `choose`; ignored for a universal checkpoint.

    Raises:
        CheckpointError: the requested checkpoint is incomplete, or all are.
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
    if choice is not None and choice.record is not None and choice.manifest is not None:
        check_partitions(choice.tag_dir, choice.manifest, choice.record.topology)
    return choice


def is_zero_file(name: str) -> bool:
    """Whether a file of a tag directory has ZeRO's state of one data-parallel rank, which no other one reads."""
    return _FILE_OF_RANK.fullmatch(name) is not None


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
    """How the optimizer state is divided between the ranks of an engine."""

    #: number of ranks that it is divided over: data-parallel times context-parallel.
    ranks: int
    zero_stage: int
    #: stages of a pipeline, over which the parameters are divided; None: unknown.
    stages: int | None = None

    def differ_from(self, before: Topology | None) -> bool:
        """Whether it was divided in another way: DeepSpeed would fail obscurely, or not notice at all. ``before``: the
        layout of the run when it saved; None if unknown.
        """
        if before is None or before.zero_stage is None:
            return False
        if self._has_other_stages(before) or self.is_of_another_kind(before):
            return True
        return before.dp * before.cp != self.ranks and max(before.zero_stage, self.zero_stage) > 0

    def is_of_another_kind(self, before: Topology) -> bool:
        """Whether DeepSpeed stored it in another form: that of ZeRO 0, of ZeRO 1 and 2, or of ZeRO 3."""
        return _kind(before.zero_stage or 0) != _kind(self.zero_stage)

    def describe(self, before: Topology) -> tuple[str, str]:
        """The layout that saved it, and the current one, in words."""
        was, now = counted(before.dp * before.cp, "data-parallel rank"), str(self.ranks)
        if self._has_other_stages(before):
            was, now = f"{was} and {counted(before.pp, 'pipeline stage')}", f"{now} and {self.stages}"
        return was, now

    def _has_other_stages(self, before: Topology) -> bool:
        return self.stages not in (None, before.pp)


def _kind(zero_stage: int) -> str:
    return "3" if zero_stage == 3 else "1 or 2" if zero_stage else "0"


def check_zero(choice: Choice, now: Partitions, *, elastic: bool, checksums: bool = False) -> Universal | None:
    """Raise a CheckpointError if an engine could not load the optimizer state: it was divided in another way, there is
    no conversion beside it, and none will be made.

    Args:
        choice: to be loaded.
        now: the engine's layout.
        elastic: whether the job will convert it.
        checksums: read every file of a conversion.

    Returns:
        an existing conversion; None if it is not needed, or is to be made.
    """
    if choice.record is None or not now.differ_from(choice.record.topology):
        return None
    before, source = choice.record.topology, choice.tag_dir
    stage, (was, ranks) = before.zero_stage or 0, now.describe(before)
    found = f"{source.name}, saved with ZeRO {stage} on {was}; {ranks} now, with ZeRO {now.zero_stage}"
    if now.is_of_another_kind(before):
        raise CheckpointError(
            "DeepSpeed cannot load the optimizer state of another kind of ZeRO",
            found=found,
            expected=f"ZeRO {_kind(stage)}",
            cause="zero_optimization.stage was changed in the DeepSpeed config",
            action=f"start with ZeRO {stage}",
        )
    if not stage:
        raise CheckpointError(
            "DeepSpeed cannot load the optimizer state of a pipeline on a different number of stages without ZeRO",
            found=found,
            expected=counted(before.pp, "pipeline stage"),
            cause="num_stages of PipelineModule was changed",
            action=f"start on {counted(before.pp, 'pipeline stage')}, and any number of data-parallel ranks",
        )
    there = read_universal(choice.tag_dir, choice.record.save_id, checksums=checksums)
    if there is None and not elastic:
        raise CheckpointError(
            "DeepSpeed cannot load ZeRO optimizer state on a different number of data-parallel ranks or stages",
            found=found,
            expected=f"{was}, or a universal checkpoint",
            cause="the job was started on another number of nodes or GPUs, or num_stages of PipelineModule was changed",
            action=f"megaresume convert {source.parent} --tag {source.name}, and start again as you did; or let the "
            "job do it: attach(..., elastic=True), --megaresume-elastic. The data needs no "
            "conversion",
        )
    return there


@dataclass(frozen=True, kw_only=True, slots=True)
class Universal:
    """A complete universal checkpoint."""

    path: Path
    #: id of the save that it was made from.
    save_id: str
    made_by: Maker
    #: bytes.
    size: int


def universal_dir(tag_dir: Path) -> Path:
    """The directory of the universal form of a checkpoint: ``global_step4_universal`` beside ``global_step4``."""
    return tag_dir.with_name(tag_dir.name + SUFFIX)


def write_seal(directory: Path, *, save_id: str, made_by: Maker) -> Universal:
    """Seal a finished conversion that still has its temporary name.

    Raises:
        OSError: a write fails.
    """
    files = list_files(directory)
    sums = checksum_files(directory, (entry.path for entry in files))
    if failed := next((error for error in sums.values() if isinstance(error, OSError)), None):
        raise failed
    fields: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": save_id,
        "made_by": made_by,
        "files": [[entry.path, entry.size, sums[entry.path]] for entry in files],
    }
    with open(directory / SEAL, "wb") as file:
        file.write(seal(fields, depth=1))
        file.flush()
        os.fsync(file.fileno())
    return Universal(path=directory, save_id=save_id, made_by=made_by, size=sum(entry.size for entry in files))


def read_universal(tag_dir: Path, save_id: str, *, checksums: bool = False) -> Universal | None:
    """The universal form of a checkpoint, if there is one.

    Args:
        tag_dir: of the checkpoint.
        save_id: of its save.
        checksums: read every file, and verify its checksum.

    Returns:
        None if there is none.

    Raises:
        CheckpointError: there is one that cannot be used: not ours, from another save, or with files that are missing
            or damaged.
    """
    directory = universal_dir(tag_dir)
    if not directory.is_dir():
        return None
    if not (directory / SEAL).exists():
        raise _refused(directory, f"a directory without {SEAL}", "it was converted by hand, perhaps not to its end")
    made_of, made_by, files = _read_seal(directory)
    if made_of != save_id:
        raise _refused(directory, f"made of save {made_of}", "that step was saved again since")
    wrong = verify_files(directory, files, mode="checksums" if checksums else "sizes")
    if wrong:
        cause = "files were deleted, cut short or damaged after the conversion"
        raise _refused(directory, "; ".join(map(str, wrong[:5])), cause)
    return Universal(path=directory, save_id=save_id, made_by=made_by, size=sum(entry.size for entry in files))


def _refused(directory: Path, found: str, cause: str) -> CheckpointError:
    source = directory.name.removesuffix(SUFFIX)
    return CheckpointError(
        f"{directory.name} is in the way of a universal checkpoint",
        found=f"{directory}: {found}",
        expected=f"none, or a whole one that megaresume made of {source}",
        cause=cause,
        action=f"rm -r {quote(str(directory))}    (or, to load it as it is, set load_universal)",
    )


def remove_converted(root: Path) -> None:
    """Remove what jobs have converted for themselves, as a newer checkpoint was committed. After a commit, on rank 0.

    The files are deleted in a thread, as there may be ten thousand of them.
    """
    gone: list[Path] = []
    for path in list_universal(root):
        if path.name.endswith(SUFFIX) and _made_by_job(path):
            away = path.with_name(leftover_name(path.name))
            with contextlib.suppress(OSError):  # what cannot be removed does no harm
                path.rename(away)
                gone.append(away)
    delete_soon(gone)


def _made_by_job(directory: Path) -> bool:
    try:
        return _read_seal(directory)[1] == "job"
    except Exception:  # noqa: BLE001  whatever it is, it is not known to be ours, and stays
        return False


def _read_seal(directory: Path) -> tuple[str, Maker, tuple[FileEntry, ...]]:
    """(the save that it was made from, who requested it, its files). Raises CheckpointError."""

    def make(fields: Mapping[str, Any]) -> tuple[str, Maker, tuple[FileEntry, ...]]:
        made_by: Maker = "job" if text(fields["made_by"]) == "job" else "command"
        return text(fields["save_id"]), made_by, tuple(file_entry(row) for row in rows(fields["files"]))

    what = "the seal of the universal checkpoint"
    return read_record(directory / SEAL, make, what=what, format_name=FORMAT, version=VERSION, error=CheckpointError)


def list_universal(root: Path) -> list[Path]:
    """The universal checkpoints in a directory, including unfinished ones."""
    try:
        return [root / name for name in sorted(os.listdir(root)) if SUFFIX in name]
    except OSError:
        return []
