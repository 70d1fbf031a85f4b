"""Megatron's tracker, ``latest_checkpointed_iteration.txt``: empty, garbled or missing is an error, not a fresh start.

Stock Megatron writes it in place, so that a kill leaves it empty; it then prints "Invalid metadata file" and exits
with status 0, as if the training were over. Without a tracker it begins at iteration 0, whatever the directory holds.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaresume.checkpoint.choosing.candidates import Candidate, examine, list_candidates
from megaresume.checkpoint.choosing.choose import choose
from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.files import read_file
from megaresume.checkpoint.ledger import read_ledger
from megaresume.checkpoint.paths import TRACKER, ledger_path, marker_path, megatron_tag
from megaresume.checkpoint.pointers import read_pointer
from megaresume.stream.errors import CheckpointError, MegaresumeError


def around_read_metadata(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``read_metadata(tracker) -> (iteration, release)``, collective where the processes are a group.

    Raises, on every rank:
        CheckpointError: the file says nothing that Megatron could load.
    """

    @functools.wraps(original)
    def read_metadata(tracker_filename: Any, *args: Any, **kwargs: Any) -> Any:
        from megaresume.session.ranks import on_all_ranks  # deferred: torch, which `check_tracker` needs not

        if "://" not in str(tracker_filename):
            on_all_ranks(lambda: check_content(Path(tracker_filename)))
        try:
            return original(tracker_filename, *args, **kwargs)
        except SystemExit as error:
            raise _invalid(Path(tracker_filename), "nothing that Megatron reads as an iteration") from error

    return read_metadata


def check_content(path: Path) -> None:
    """Raise a CheckpointError where the tracker says nothing that Megatron could load."""
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
        f"{path.name} says nothing that can be loaded",
        found=f"{path}: {found}",
        expected="the iteration of a checkpoint, or release",
        cause="a job was killed, or the disk was full, while Megatron wrote this file in place",
        action=_remedy(path.parent),
    )


def _remedy(root: Path) -> str:
    """Which checkpoint to point to, as far as the directory tells."""
    iteration = None
    with contextlib.suppress(MegaresumeError, OSError):
        choice = choose(root)
        iteration = None if choice is None else choice.iteration
    if iteration is None:
        return f"megaresume inspect {root}, then: echo ITERATION > {root / TRACKER}"
    return (
        f"echo {iteration} > {root / TRACKER}    (iter_{iteration:07d} is there; megaresume inspect {root} says more)"
    )


#: what Megatron will load, as far as its manifest tells, and whether that is another one than its tracker names.
Found = tuple[Choice | None, bool]


def check_tracker(args: Any, *, checksums: bool = False, damaged: Mapping[Path, str] | None = None) -> Found:
    """On rank 0, before Megatron's load: is what it will load whole, and is it all right if there is no tracker?

    It is at the first start of a run that loads from where it will save, where nothing was ever finished. And where
    Megatron loads something else: ``--ckpt-step`` that is there, ``--pretrained-checkpoint``, a non-persistent one.

    Args:
        args: Megatron's namespace.
        checksums: read every file that has a checksum in the manifest.
        damaged: tag directories that could not be read, with the reason.

    Returns:
        the checkpoint, None if it has no manifest; and whether it takes the place of one that is damaged.

    Raises:
        CheckpointError: the iteration of ``--ckpt-step`` is not there, or not whole; no checkpoint is whole; there are
            checkpoints without a tracker; or nothing, where something must be.
    """
    load = getattr(args, "load", None)
    if not load or "://" in str(load):
        return None, False
    if os.path.isfile(os.path.join(load, TRACKER)):
        _check_step(args, Path(os.path.abspath(load)))
        return _check_whole(args, Path(os.path.abspath(load)), checksums, damaged or {})
    if getattr(args, "pretrained_checkpoint", None):
        return None, False
    if getattr(args, "ckpt_step", None):
        _check_step(args, Path(os.path.abspath(load)))
        return None, False
    if getattr(args, "non_persistent_ckpt_type", None) == "local" or _has_non_persistent(args, load):
        return None, False
    root = Path(os.path.abspath(load))
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
    return None, False


def _check_step(args: Any, root: Path) -> None:
    """Refuse a ``--ckpt-step`` that is not there: Megatron would open its files and fail on the first."""
    step = getattr(args, "ckpt_step", None)
    if not step or getattr(args, "non_persistent_ckpt_type", None) or (root / megatron_tag(int(step))).is_dir():
        return
    # A tracker that says "release" wins over --ckpt-step.
    if read_pointer(root, TRACKER).tag == "release":
        return
    there = [c for c in list_candidates(root) if c.has_dir and c.iteration is not None and not c.unfinished]
    there = [c for c in there if c.tag == megatron_tag(c.order)]
    some = ", ".join(str(c.iteration) for c in there[:10]) + (", ..." if len(there) > 10 else "")
    raise CheckpointError(
        f"there is no checkpoint of iteration {step}, which --ckpt-step asks for",
        found=f"in --load {root}: " + (f"iterations {some}" if there else "no checkpoint of any iteration"),
        expected=f"a directory {megatron_tag(int(step))}",
        cause="a typing error, a save at another interval, or a checkpoint that was deleted",
        action=_nearest(root, there, int(step)) if there else "correct --load, or leave --ckpt-step out",
    )


def _nearest(root: Path, there: list[Candidate], step: int) -> str:
    """The last one before the step that was asked for, or else the first after it; whole ones only, if we know."""
    before = [c for c in there if c.order < step]
    later = [c for c in reversed(there) if c.order > step]
    for candidate in (*before, *later):
        with contextlib.suppress(MegaresumeError):
            if examine(root, candidate).status in ("complete", "unmanaged"):
                return f"--ckpt-step {candidate.iteration}; megaresume inspect {root} says more"
    return f"megaresume inspect {root} shows what is there"


def _check_whole(args: Any, root: Path, checksums: bool, damaged: Mapping[Path, str]) -> Found:
    """Compare the checkpoint that Megatron will load with its manifest, if it has one; if it is not whole, and was not
    asked for by --ckpt-step, the newest one that is takes its place."""
    tracker = read_pointer(root, TRACKER)
    iteration = getattr(args, "ckpt_step", None) or tracker.iteration
    if iteration is None or getattr(args, "non_persistent_ckpt_type", None):
        return None, False
    tag = megatron_tag(int(iteration))
    candidate = next((c for c in list_candidates(root) if c.tag == tag and c.has_dir), None)
    if candidate is None or "manifest" not in candidate.records:
        return None, False
    found, unread = examine(root, candidate, checksums=checksums), damaged.get(root / tag)
    if unread is None and (
        found.status == "complete" or (found.status == "incomplete" and _moved_since(root, candidate))
    ):
        manifest = found.manifest if found.status == "complete" else None
        return Choice(load_dir=root, tag=tag, iteration=int(iteration), step=found.step, manifest=manifest), False
    if not getattr(args, "ckpt_step", None):
        with contextlib.suppress(MegaresumeError):
            other = choose(root, checksums=checksums, damaged=damaged)
            if other is not None and other.state is not None and other.tag == megatron_tag(other.iteration or 0):
                return other, True
    raise CheckpointError(
        f"the checkpoint {tag} is {found.status if unread is None else 'damaged'}",
        found=f"{root / tag}: {unread or found.reason}",
        expected="every file of its manifest, with its size" + " and its checksum" * checksums,
        cause="a second save of this step was killed, or was made without megaresume; the disk was full; or files "
        "were deleted or copied in part",
        action=_other(root, candidate),
    )


def _moved_since(root: Path, candidate: Candidate) -> bool:
    """Whether Megatron moved its tracker after the save of the marker began: then that save was done."""
    marker = marker_path(root, candidate.order, candidate.tag)
    return (root / TRACKER).stat().st_mtime_ns >= marker.stat().st_mtime_ns


def _other(root: Path, damaged: Candidate) -> str:
    for candidate in list_candidates(root):
        if candidate.has_dir and candidate is not damaged and candidate.order < damaged.order:
            with contextlib.suppress(MegaresumeError):
                if examine(root, candidate).status == "complete":
                    return f"--ckpt-step {candidate.iteration} goes on from {candidate.tag}, which is complete"
    return f"megaresume inspect {root} shows what is there"


def _has_non_persistent(args: Any, load: str) -> bool:
    if getattr(args, "non_persistent_ckpt_type", None) != "global":
        return False
    directory = getattr(args, "non_persistent_global_ckpt_dir", None) or os.path.join(load, "non_persistent")
    return os.path.isfile(os.path.join(directory, TRACKER))


def _without_tracker(root: Path, there: list[Candidate], finished: list[str | None]) -> CheckpointError:
    names = [c.tag for c in there]
    found = f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else "no checkpoint any more"
    if finished:
        found += f"; the ledger knows of {len(finished)}, the last of them {finished[-1]}"
    return CheckpointError(
        "there are checkpoints, but no tracker: Megatron would begin at iteration 0",
        found=f"{root}: {found}; no {TRACKER}",
        expected="the tracker, or an empty directory",
        cause="the directory was copied or cleaned up in part, or the first save of a run without records was killed",
        action=_remedy(root) + "; to begin anew, use an empty directory",
    )
