"""What a framework and torch say of a file that fails, with what it means for the checkpoint and what to do.

Their own words ("PytorchStreamReader failed reading zip archive") name neither checkpoint nor way out. A rank that
fails inside a framework is alone with it: the others wait in a collective, and its launcher ends them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from megaresume.checkpoint.choose import Choice
from megaresume.stream.errors import CheckpointError, MegaresumeError

__all__ = ["reading", "writing"]


@contextmanager
def writing(tag_dir: Path) -> Iterator[None]:
    """Around a host's save. Raises CheckpointError in place of what is raised inside."""
    try:
        yield
    except Exception as error:
        if _is_known(error):
            raise
        raise CheckpointError(
            f"the files of the checkpoint {tag_dir.name} could not be written; the pointers stay as they were",
            found=_words(error) + _room(tag_dir.parent),
            expected=f"room and permission to write in {tag_dir}",
            cause="the disk is full, the quota is used up, or the filesystem has become read-only",
            action="make room, then start again: the checkpoint before this one is untouched",
        ) from error


@contextmanager
def reading(choice: Choice) -> Iterator[None]:
    """Around a host's load of what was chosen. Raises CheckpointError in place of what is raised inside."""
    try:
        yield
    except Exception as error:
        if _is_known(error):
            raise
        summed = choice.manifest is not None and choice.manifest.has_checksums
        raise CheckpointError(
            f"the checkpoint {choice.tag} cannot be read, although every file is there",
            found=_words(error),
            expected=f"the files in {choice.tag_dir} as they were saved, for this model and this parallel layout",
            cause="the storage returns other bytes than were written; or the model, or its config, was changed",
            action=f"megaresume inspect {choice.load_dir} --checksums names damaged files"
            + (
                "; verify_checkpoint=True (--megaresume-verify-checkpoint) passes over them"
                if summed
                else ", in checkpoints that were saved with verify_checkpoint=True (--megaresume-verify-checkpoint)"
            )
            + "; to go on from an older one, ask for its tag",
        ) from error


def _is_known(error: Exception) -> bool:
    """Ours; or a broken connection: another rank is gone, and says why."""
    return isinstance(error, MegaresumeError | dist.DistError) or "gloo" in str(error)


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no words"]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _room(directory: Path) -> str:
    with suppress(OSError):
        return f"; {shutil.disk_usage(directory).free / 1e9:,.1f} GB are free in {directory}"
    return ""
