"""What lies beside a checkpoint that Megatron-LM wrote: state, manifest, ledger line, data.yaml. On rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaresume.checkpoint.atomic import make_dir
from megaresume.checkpoint.choose import Choice
from megaresume.checkpoint.clock import utc
from megaresume.checkpoint.commit import PendingCheckpoint, begin_save, commit_save, run_of
from megaresume.checkpoint.data_file import write_data_file
from megaresume.checkpoint.fresh import check_fresh_start
from megaresume.checkpoint.layout import deepspeed_tag, manifest_path, marker_path, megatron_tag, step_path
from megaresume.checkpoint.lock import check_owned, release, take
from megaresume.checkpoint.manifest import FileEntry
from megaresume.checkpoint.marker import Marker, remove_marker, write_marker
from megaresume.checkpoint.progress import NOTHING_TO_TRAIN, check_progress
from megaresume.checkpoint.start import record_start
from megaresume.checkpoint.state_file import StepFile, new_id, read_step_file
from megaresume.checkpoint.superseded import retire_records
from megaresume.checkpoint.topology import Topology
from megaresume.integrations.loaders.record import LoaderRecord, is_of_loader
from megaresume.integrations.megatron.schedule import schedule_from_args
from megaresume.integrations.megatron.session import Session
from megaresume.integrations.megatron.state import SavedState
from megaresume.stream.errors import MegaresumeError, StateError
from megaresume.stream.state import StreamState

__all__ = [
    "GuardSave",
    "Save",
    "begin",
    "begin_guard",
    "can_be_written",
    "compare",
    "settle_start",
    "tag_of",
    "topology_of",
    "write_guard",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """A save that has begun, with everything that its commit will write."""

    pending: PendingCheckpoint
    #: for data.yaml.
    origin: Mapping[str, Any] | None
    #: files of this save in ``<save>/megaresume``: the states of a loader.
    beside: tuple[FileEntry, ...] = ()
    #: of all files, for the manifest.
    checksums: bool = False

    @property
    def save_dir(self) -> Path:
        """The checkpoint root."""
        return self.pending.save_dir

    def commit(self) -> tuple[str, ...]:
        """Write the records. Returns what somebody should know: sentences."""
        notes = commit_save(self.pending, beside=self.beside, checksums=self.checksums).notes
        if self.origin is not None:
            write_data_file(self.pending.save_dir, self.origin)
        return notes


def can_be_written(save_dir: object) -> bool:
    """Whether this is a directory of this machine; in object storage (``msc://``) the state is in ``args`` only."""
    return bool(save_dir) and "://" not in str(save_dir)


def tag_of(project: Any, iteration: int) -> str:
    """Name of the tag directory of an iteration."""
    return megatron_tag(iteration) if project.kind == "megatron-lm" else deepspeed_tag(iteration)


def topology_of(args: Any, samples: int, project: Any = None) -> Topology:
    """How a run is laid out that has these arguments, at ``samples`` trained samples."""

    def count(name: str, default: int = 1) -> int:
        return int(getattr(args, name, None) or default)

    try:
        size: int | None = schedule_from_args(args, project).size_at(samples)
    except MegaresumeError:
        size = None  # information for people: a namespace that lacks it is no error
    return Topology(
        world_size=count("world_size"),
        dp=count("data_parallel_size"),
        tp=count("tensor_model_parallel_size"),
        pp=count("pipeline_model_parallel_size"),
        cp=count("context_parallel_size"),
        num_workers=count("num_workers", 0),
        micro_batch_size=getattr(args, "micro_batch_size", None),
        global_batch_size=size,
    )


def begin(current: Session, iteration: int, state: StreamState, *, tracker: bool) -> PendingCheckpoint:
    """Announce a save to ``args.save``.

    Args:
        current: the session.
        iteration: optimizer steps done.
        state: the stream as trained up to here.
        tracker: write the tracker once more, durably, behind Megatron, which writes it in place.

    Raises:
        CheckpointError: another job writes there by now, or the disk refuses.
    """
    take(current.args.save)
    return begin_save(
        current.args.save,
        tag=megatron_tag(iteration),
        iteration=iteration,
        state=state,
        topology=topology_of(current.args, state.samples, current.project),
        latest=False,
        tracker=tracker,
        retention=current.settings.retention,
    )


def write_guard(save_dir: str | Path, payload: Mapping[str, Any]) -> None:
    """The guard keeps one record for all checkpoints of a root."""
    from megaresume.integrations.megatron.guard import write_record

    write_record(save_dir, payload)


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardSave:
    """The same of a run under guard, which keeps one record for all checkpoints of a root."""

    save_dir: Path
    marker: Path
    payload: Mapping[str, Any]

    def commit(self) -> tuple[str, ...]:
        """Write the record; the save is over."""
        check_owned(self.save_dir)
        write_guard(self.save_dir, self.payload)
        remove_marker(self.marker)
        return ()


def begin_guard(current: Session, iteration: int, payload: Mapping[str, Any]) -> GuardSave:
    """Announce a save: a marker, so that a tag directory that a kill cut short is known as such."""
    root, tag = Path(os.path.abspath(current.args.save)), megatron_tag(iteration)
    path = marker_path(root, iteration, tag)
    make_dir(path.parent)
    take(root)
    marker = Marker(
        iteration=iteration,
        tag=tag,
        save_id=new_id(),
        run=run_of(root) or new_id(),
        began_at=utc(time.time()),
        latest=False,
        tracker=False,
    )
    write_marker(path, marker)
    # Of a stream that was trained here before: its manifest would call the new files damaged.
    retire_records(root, iteration, tag)
    return GuardSave(save_dir=root, marker=path, payload=payload)


def _step_file(load_dir: Path, iteration: int) -> StepFile | None:
    path = step_path(load_dir, iteration, megatron_tag(iteration))
    return read_step_file(path, iteration=iteration, tag=megatron_tag(iteration)) if path.exists() else None


def _is_marked(load_dir: Path, iteration: int) -> bool:
    return marker_path(load_dir, iteration, megatron_tag(iteration)).exists()


def compare(current: Session, state: SavedState) -> None:
    """Raise a StateError where the state in the checkpoint is not the one beside it. On every rank."""
    source = current.loaded_from
    if source is None or state.stream is None or not can_be_written(source.load_dir):
        return
    # Records are of persistent checkpoints. A marker: the save of this step was the last thing that happened, and
    # what lies beside is of an earlier save of the same step.
    if getattr(current.args, "non_persistent_ckpt_type", None) or _is_marked(source.load_dir, state.iteration):
        return
    beside = _step_file(source.load_dir, state.iteration)
    within = StreamState.from_json(state.stream)
    if beside is not None and beside.state != within:
        raise StateError(
            "the data state in the checkpoint is not the one beside it",
            found=f"within: sample {within.samples}, digest {within.digest}",
            expected=f"beside: sample {beside.state.samples}, digest {beside.state.digest}",
            cause="a tag directory was copied over another one, or its records were",
            action=f"megaresume inspect {source.load_dir}; load a checkpoint that is whole, with --ckpt-step N",
        )


def settle_start(current: Session, iteration: int, state: StreamState | None) -> None:
    """Write the records that the loaded checkpoint lacks, and this start into the ledger of ``--save``.

    Args:
        current: the session.
        iteration: optimizer steps done.
        state: the stream where training begins; None: under guard, which has no ledger.

    Raises:
        UsageError: nothing was loaded, and the run would save over what is there.
        CheckpointError: the directory cannot be written, or start after start leads to no save.
    """
    args, source = current.args, current.loaded_from
    if not can_be_written(args.save):
        return
    root = Path(os.path.abspath(args.save))
    if root in current.start_recorded_in:
        return
    current.start_recorded_in.add(root)
    if iteration == 0 or source is None or not _same_place(source.load_dir, root):
        check_fresh_start(
            root, cause="--load was forgotten, or --finetune left in", load=f"--load {root} without --finetune"
        )
    is_over = _is_over(args, iteration, int(args.consumed_train_samples))
    if state is None:
        if is_over:
            release(root)
        if source is not None:  # loaded, so its save was over: a kill came between Megatron's tracker and our marker
            remove_marker(marker_path(root, source.iteration, megatron_tag(source.iteration)))
        return
    choice = None
    if current.loaded is not None and source is not None:
        step = _write_missing(current) if _same_place(source.load_dir, root) else None
        tag = tag_of(current.project, source.iteration)
        choice = Choice(load_dir=source.load_dir, tag=tag, iteration=source.iteration, step=step, manifest=None)
    now = topology_of(args, state.samples, current.project)
    details = {NOTHING_TO_TRAIN: True} if is_over else None
    record_start(root, iteration=iteration, state=state, choice=choice, topology=now, details=details)
    if is_over:
        release(root)  # nothing more is written
    else:
        check_progress(
            root,
            iteration=iteration,
            save_interval=getattr(args, "save_interval", None),
            max_starts=current.settings.max_starts,
        )


def _is_over(args: Any, iteration: int, samples: int) -> bool:
    """Whether nothing is left to train: a finished run may be launched any number of times."""
    iters, end = getattr(args, "train_iters", None), getattr(args, "train_samples", None)
    return (iters is not None and iteration >= iters) or (end is not None and samples >= end)


def _same_place(first: Path, second: Path) -> bool:
    try:
        return os.path.samefile(first, second)
    except OSError:
        return False


def _write_missing(current: Session) -> StepFile | None:
    """The records of the loaded checkpoint, written if a kill or a copy lost them; None: it has no place for any."""
    source, loaded = current.loaded_from, current.loaded
    assert source is not None and loaded is not None
    root, iteration, tag = source.load_dir, loaded.iteration, megatron_tag(loaded.iteration)
    if current.project.kind != "megatron-lm" or loaded.stream is None or not (root / tag).is_dir():
        return None
    state = StreamState.from_json(loaded.stream)
    complete = step_path(root, iteration, tag).exists() and manifest_path(root, iteration, tag).exists()
    if complete:
        step = read_step_file(step_path(root, iteration, tag), iteration=iteration, tag=tag)
        if step.state == state or getattr(current.args, "non_persistent_ckpt_type", None):
            return step
    topology = topology_of(source.args, loaded.samples)
    pending = begin_save(
        root, tag=tag, iteration=iteration, state=state, topology=topology, latest=False, tracker=False
    )
    beside: tuple[FileEntry, ...] = ()
    if is_of_loader(state):  # whose states were written before Megatron's own files
        beside = LoaderRecord.from_state(state).entries(iteration, tag)
    return commit_save(pending, beside=beside).step
