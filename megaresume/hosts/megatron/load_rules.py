"""Rules for loading under Megatron, which need only records and configs, not torch.

`megaresume plan` applies them before any rank is started; the hooks, on the ranks.

Megatron's tracker, ``latest_checkpointed_iteration.txt``, says which checkpoint to load. Stock Megatron writes it in
place, so a kill can leave it empty; it then prints "Invalid metadata file" and exits with status 0, as if the training
were over. Without a tracker it starts at iteration 0, whatever the directory holds. With megaresume:

    tracker names a complete checkpoint   load that one
    names a damaged one                   the newest complete one
    names nothing, or a missing one       the same, and the tracker is repaired; if nothing was ever committed, a
                                          fresh start
    there is no tracker                   an error if there are checkpoints
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megaresume.checkpoint.load.choose import choose, choose_of_two
from megaresume.checkpoint.load.search import Choice, ForeignCheckpoint
from megaresume.checkpoint.lock.lock import write_tracker
from megaresume.checkpoint.records.candidates import Candidate, examine, list_candidates
from megaresume.checkpoint.records.envelope import Kind
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import TRACKER, ledger_path, marker_path, megatron_tag
from megaresume.checkpoint.records.pointers import Pointer, read_pointer
from megaresume.files import read_file
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import CheckpointError, MegaresumeError, StateError, UsageError, listed

#: How to load only the weights of a checkpoint. A run that starts does not save over another one.
BEGIN_ANEW = "--finetune and another --save"


#: kind of data state -> the mode that trains on it, and how to ask for that mode.
_MODES: dict[Kind, tuple[str, str]] = {
    "stream": (
        "mode stream",
        "--megaresume-data or --megaresume-mode stream; for a megaresume.DataLoader, --dataloader-type external",
    ),
    "order": ("mode guard", "--megaresume-mode guard"),
    "loader": ("a loader of the script's", "--dataloader-type external, and no --megaresume-data"),
}


def check_mode(kind: Kind | None, mode: str) -> None:
    """Raise a StateError if a checkpoint of one mode would be continued in another.

    Args:
        kind: the kind of data state in the checkpoint; None if it has none.
        mode: the mode of this launch: stream or guard.
    """
    if kind is None or _MODES[kind][0] == f"mode {mode}":
        return
    saved, flag = _MODES[kind]
    raise StateError(
        f"the checkpoint was trained in {saved}, and this is mode {mode}",
        found=f"mode {mode}",
        expected=saved,
        cause="a flag was left out or added between save and resume",
        action=f"pass {flag}; or start the data over: {BEGIN_ANEW}",
    )


def check_stages(config: StreamConfig, seq_length: int) -> None:
    """Refuse later stages with other sample shapes: they may change the blend, but Megatron's shape is fixed."""
    for stage in config.stages:
        length = stage.seq_length or seq_length
        if length != seq_length or (stage.packing is not None and stage.packing != config.packing):
            raise UsageError(
                f"stage '{stage.name}' changes the shape of samples in the middle of a launch",
                found=", ".join(f"{key}: {value}" for key, value in stage.to_dict().items()),
                expected="stages that change weights only",
                cause="Megatron builds its model and its loaders for one sequence length and one packing",
                action="stop the run there (--exit-interval), then resume with the new value in the data config and "
                "--megaresume-on-change stage",
            )


def without_state(iteration: int, position: int) -> StateError:
    """The error for training that continues without a stream's state to resume from."""
    return StateError(
        "training continues, but no data state was restored",
        found=f"iteration {iteration}, {position} samples trained, no data state",
        expected="the data state of the checkpoint that was loaded",
        cause="the checkpoint was saved without megaresume, or not with a megaresume stream",
        action="continue with Megatron's own data: --megaresume-mode guard; or start the data over: "
        f"{BEGIN_ANEW}; or load a checkpoint that has one: megaresume inspect DIR",
    )


def around_read_metadata(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook on Megatron's ``read_metadata(tracker) -> (iteration, release)``, collective once there is a process group.

    If the tracker names nothing and was not repaired (`mend_tracker`), gives the newest complete checkpoint.

    Raises, on every rank:
        CheckpointError: the file names nothing that Megatron could load, and neither does a manifest.
    """

    def read_metadata(tracker_filename: Any, *args: Any, **kwargs: Any) -> Any:
        from megaresume.checkpoint.ranks import (  # deferred: needs torch, and `check_tracker` does not
            on_all_ranks,
            on_rank_0,
        )

        path = Path(tracker_filename)
        if "://" not in str(tracker_filename):
            instead = on_rank_0(lambda: _instead(path.parent, read_pointer(path.parent, TRACKER)))
            if isinstance(instead, Choice):
                return instead.iteration, False
            on_all_ranks(lambda: check_content(path))
        try:
            return original(tracker_filename, *args, **kwargs)
        except SystemExit as error:
            raise _invalid(path, "nothing that Megatron reads as an iteration") from error

    return read_metadata


def is_unusable(tracker: Pointer) -> bool:
    """Whether a tracker fails to say what to load, after a kill or on a full disk, or names something that is gone."""
    return tracker.status in ("empty", "garbled", "dangling") and tracker.tag != "release"


def _instead(
    root: Path, tracker: Pointer, damaged: Mapping[Path, str] | None = None
) -> Choice | ForeignCheckpoint | None:
    """The checkpoint to load if the tracker names none, see `_newest`; `ForeignCheckpoint`: load what it names."""
    if not is_unusable(tracker):
        return ForeignCheckpoint()
    try:
        choice = _newest(root, damaged)
    except MegaresumeError:
        if tracker.status != "dangling":
            raise
        choice = None
    return ForeignCheckpoint() if choice is None and tracker.status == "dangling" else choice


def _newest(root: Path, damaged: Mapping[Path, str] | None = None) -> Choice | None:
    """The newest checkpoint whose manifest confirms it; None if nothing was ever committed.

    Raises:
        CheckpointError: there are, or were, only unconfirmed ones.
    """
    choice = choose(root, damaged=damaged)
    if choice is not None and (choice.state is None or choice.tag != megatron_tag(choice.iteration or 0)):
        raise _invalid(root / TRACKER, read_pointer(root, TRACKER).problem or "nothing that is complete")
    return choice


def check_content(path: Path) -> None:
    """Raise a CheckpointError if, as this rank sees it, the tracker names nothing that Megatron could load."""
    try:
        text = read_file(path).decode("utf-8", "backslashreplace").strip()
    except OSError as error:
        raise _invalid(path, error.strerror or str(error)) from error
    try:
        fine = text == "release" or int(text) >= 0
    except ValueError:
        fine = False
    if not fine:
        raise _invalid(path, "an empty file" if not text else repr(text[:80]))


def _invalid(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} names nothing that can be loaded",
        found=f"{path}: {found}",
        expected="the iteration of a checkpoint, or release",
        cause="a job was killed, or the disk was full, while Megatron wrote this file in place",
        action=_remedy(path.parent),
    )


def _remedy(root: Path) -> str:
    """The command that points the tracker to a checkpoint, as far as the directory tells which."""
    try:
        choice = choose(root)
    except (MegaresumeError, OSError):
        return f"megaresume inspect {root}, then: echo ITERATION > {root / TRACKER}"
    if choice is None:
        return f"rm {root / TRACKER}    (no checkpoint was ever committed in {root}: the run starts over)"
    iteration = choice.iteration or 0
    return (
        f"echo {iteration} > {root / TRACKER}    (iter_{iteration:07d} is there; megaresume inspect {root} says more)"
    )


def mend_tracker(root: Path, choice: Choice | None) -> None:
    """Make a tracker that names nothing name the checkpoint to resume from, or delete it if there is none. On rank 0,
    as owner of the root. Raises CheckpointError.
    """
    if not is_unusable(read_pointer(root, TRACKER)):
        return
    if choice is not None and choice.iteration is not None:
        write_tracker(root, choice.iteration)
    else:
        (root / TRACKER).unlink()


def check_tracker(args: Any, *, damaged: Mapping[Path, str] | None = None) -> Choice | ForeignCheckpoint | None:
    """The checkpoint for Megatron to load. Reads only; on rank 0, before the load.

    The tracker may be missing at the first start of a run that loads from where it will save, if no save was ever
    finished; and if Megatron loads something else: an existing ``--ckpt-step``, ``--pretrained-checkpoint``, a
    non-persistent checkpoint.

    Args:
        args: Megatron's namespace.
        damaged: unreadable tag directories, with the reason.

    Returns:
        the checkpoint; `ForeignCheckpoint` if it has no manifest; None if there is none and the run starts afresh.

    Raises:
        CheckpointError: the iteration of ``--ckpt-step`` is missing or incomplete; no checkpoint is complete; there are
            checkpoints but no tracker; or there is nothing where something must be.
    """
    load = getattr(args, "load", None)
    if not load or "://" in str(load):
        return ForeignCheckpoint()
    root = Path(os.path.abspath(load))
    if os.path.isfile(root / TRACKER):
        _check_step(args, root)
        found = _named(args, root, damaged or {})
        if found is not None:
            return found
    if getattr(args, "pretrained_checkpoint", None):
        return ForeignCheckpoint()
    if getattr(args, "ckpt_step", None):
        _check_step(args, root)
        return ForeignCheckpoint()
    if getattr(args, "non_persistent_ckpt_type", None) == "local" or _has_non_persistent(args, load):
        return ForeignCheckpoint()
    there = [c for c in list_candidates(root) if c.has_dir and not c.unfinished]
    finished = [entry.tag for entry in read_ledger(ledger_path(root)).entries if entry.kind == "checkpoint"]
    if there or finished:
        raise _without_tracker(root, there, finished)
    same = getattr(args, "save", None) and os.path.abspath(args.save) == str(root)
    if getattr(args, "exit_on_missing_checkpoint", False) or not same:
        wanted = "--exit-on-missing-checkpoint asks for one" if same else "--save is another directory"
        raise CheckpointError(
            "there is no checkpoint to load",
            found=f"nothing in --load {load}" + ("" if root.exists() else ", which does not exist"),
            expected=f"a checkpoint, since {wanted}",
            cause="a typing error in the path, or a filesystem that is not mounted here",
            action="correct --load; for a first start, leave it out or give it the same directory as --save"
            + (", without --exit-on-missing-checkpoint" if same else ""),
        )
    return None


def newer_copy(args: Any, root: Path, copies: Path, damaged: Mapping[Path, str]) -> Choice | None:
    """The checkpoint to load from the copies of a root, if it is newer than those in the root or is the one that
    ``--ckpt-step`` asks for; None: load from the root. Reads only; on rank 0.

    Raises:
        CheckpointError: see `choose_of_two`.
    """
    if getattr(args, "pretrained_checkpoint", None) or getattr(args, "non_persistent_ckpt_type", None):
        return None
    step = getattr(args, "ckpt_step", None)
    if step and (root / megatron_tag(int(step))).is_dir():
        return None
    choice = choose_of_two(root, copies, tag=megatron_tag(int(step)) if step else None, damaged=damaged)
    return choice if choice is not None and choice.load_dir == copies else None


def _check_step(args: Any, root: Path) -> None:
    """Refuse a ``--ckpt-step`` that does not exist: Megatron would fail on opening its first file."""
    step = getattr(args, "ckpt_step", None)
    if not step or getattr(args, "non_persistent_ckpt_type", None) or (root / megatron_tag(int(step))).is_dir():
        return
    # A tracker that says "release" takes precedence over --ckpt-step.
    if read_pointer(root, TRACKER).tag == "release":
        return
    there = [c for c in list_candidates(root) if c.has_dir and c.iteration is not None and not c.unfinished]
    there = [c for c in there if c.tag == megatron_tag(c.order)]
    some = listed([c.iteration for c in there], 10)
    # The last one before the step, or else the first one after it.
    nearest = sorted(there, key=lambda c: (c.order > int(step), abs(c.order - int(step))))
    raise CheckpointError(
        f"there is no checkpoint of iteration {step}, which --ckpt-step asks for",
        found=f"in --load {root}: " + (f"iterations {some}" if there else "no checkpoint of any iteration"),
        expected=f"a directory {megatron_tag(int(step))}",
        cause="a typing error, a save at another interval, or a checkpoint that was deleted",
        action=_advice(root, nearest) if there else "correct --load, or leave --ckpt-step out",
    )


def _advice(root: Path, candidates: Iterable[Candidate]) -> str:
    """Which checkpoint to ask for: the first complete one of these, if known."""
    for candidate in candidates:
        with contextlib.suppress(MegaresumeError):
            if examine(root, candidate).status in ("complete", "unmanaged"):
                return f"--ckpt-step {candidate.iteration}; megaresume inspect {root} says more"
    return f"megaresume inspect {root} shows what is there"


def _named(args: Any, root: Path, damaged: Mapping[Path, str]) -> Choice | ForeignCheckpoint | None:
    """The checkpoint that the tracker or --ckpt-step names, checked against its manifest if it has one. If the
    tracker's is incomplete, the newest complete one replaces it. Any other incomplete one: CheckpointError."""
    tracker, step = read_pointer(root, TRACKER), getattr(args, "ckpt_step", None)
    if getattr(args, "non_persistent_ckpt_type", None):
        return ForeignCheckpoint()
    if not step and is_unusable(tracker):
        return _instead(root, tracker, damaged)
    if not step and tracker.iteration is None:
        return ForeignCheckpoint()
    tag = megatron_tag(int(step or tracker.iteration or 0))
    candidate = next((c for c in list_candidates(root) if c.tag == tag and c.has_dir), None)
    if candidate is None or "manifest" not in candidate.records:
        return ForeignCheckpoint()
    found, unread = examine(root, candidate), damaged.get(root / tag)
    if unread is None and found.status == "complete":
        return Choice(
            load_dir=root, tag=tag, iteration=candidate.iteration, record=found.record, manifest=found.manifest
        )
    if unread is None and found.status == "incomplete" and _moved_since(root, candidate):
        return Choice(load_dir=root, tag=tag, iteration=candidate.iteration, record=None, manifest=None)
    if not step:
        with contextlib.suppress(MegaresumeError):
            if (other := _newest(root, damaged)) is not None:
                return other
    raise CheckpointError(
        f"the checkpoint {tag} is {found.status if unread is None else 'damaged'}",
        found=f"{root / tag}: {unread or found.reason}",
        expected="every file of its manifest, with its size and its checksum",
        cause="a second save of this step was killed, or was made without megaresume; the disk was full; or files "
        "were deleted or copied in part",
        action=_advice(root, (c for c in list_candidates(root) if c.has_dir and c.order < candidate.order)),
    )


def _moved_since(root: Path, candidate: Candidate) -> bool:
    """Whether Megatron moved its tracker after the marker's save began, so that save was completed."""
    marker = marker_path(root, candidate.order, candidate.tag)
    return (root / TRACKER).stat().st_mtime_ns >= marker.stat().st_mtime_ns


def _has_non_persistent(args: Any, load: str) -> bool:
    if getattr(args, "non_persistent_ckpt_type", None) != "global":
        return False
    directory = getattr(args, "non_persistent_global_ckpt_dir", None) or os.path.join(load, "non_persistent")
    return os.path.isfile(os.path.join(directory, TRACKER))


def _without_tracker(root: Path, there: list[Candidate], finished: list[str | None]) -> CheckpointError:
    names = [c.tag for c in there]
    found = listed(names, 5) or "no checkpoint any more"
    if finished:
        found += f"; the ledger knows of {len(finished)}, the last of them {finished[-1]}"
    return CheckpointError(
        "there are checkpoints, but no tracker: Megatron would begin at iteration 0",
        found=f"{root}: {found}; no {TRACKER}",
        expected="the tracker, or an empty directory",
        cause="the directory was copied or cleaned up in part, or the first save of a run without records was killed",
        action=_remedy(root) + "; to start over, use an empty directory",
    )
