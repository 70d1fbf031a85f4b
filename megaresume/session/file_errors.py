"""What a framework and torch say of a file that fails, with what it means for the checkpoint and what to do.

Their own words ("PytorchStreamReader failed reading zip archive") name neither checkpoint nor way out. A rank that
fails inside a framework is alone with it: the others wait in a collective, and its launcher ends them.
"""

from __future__ import annotations

import errno
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megaresume.checkpoint.choosing.search import Choice
from megaresume.session.ranks import known_to_all, meet
from megaresume.stream.errors import CheckpointError, MegaresumeError

T = TypeVar("T")


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
            + ("" if summed else ", in checkpoints that were saved with checksums (the default)")
            + "; to go on from an older one, ask for its tag",
        ) from error


class DamagedError(CheckpointError):
    """Files of a checkpoint cannot be read, on one rank at least. Raised by all of them: an older one may do."""

    tag_dir: Path


def read_undamaged(read: Callable[[Mapping[Path, str]], T]) -> T:
    """Read what can be read: ``read`` is told the tag directories that could not be, with the reasons, and passes them
    over. On every rank. Raises what ``read`` does."""
    damaged: dict[Path, str] = {}
    while True:
        try:
            return read(damaged)
        except DamagedError as error:
            if error.tag_dir in damaged:
                raise
            damaged[error.tag_dir] = f"{error.headline} ({error.found})"


#: what torch and the formats below it say of a file that is not what was written.
_DAMAGE = re.compile(
    r"PytorchStreamReader|zip archive|unpickl|pickle data|invalid load key|Ran out of input|corrupt", re.I
)


def read_on_all_ranks(read: Callable[[], T], choice: Choice) -> T:
    """Run a framework's load. On every rank.

    The ranks meet at the store of their process group: those that succeed may be in a collective of the framework's,
    which no other collective may cross. Then, after a while, the rank that failed raises alone.

    Raises, on every rank:
        DamagedError: a rank could not read a file whose checksum was not compared before.
    """
    error: Exception | None = None
    try:
        value = read()
    except Exception as problem:
        if not is_damage(problem, choice):
            raise
        error = problem
    words = meet(None if error is None else _words(error))
    if words is not None:
        damage = DamagedError(f"{choice.tag} cannot be read, although every file is there", found=words)
        damage.tag_dir = choice.tag_dir
        raise known_to_all(damage) from error
    if error is not None:
        raise error
    return value


def is_damage(error: BaseException, choice: Choice) -> bool:
    """Whether an error of a framework's load says that a file is not what was written."""
    if isinstance(error, OSError) and error.errno == errno.EIO:
        return True
    if choice.manifest is not None and choice.manifest.has_checksums:
        return False  # compared: it is the model that does not fit
    return isinstance(error, (EOFError, pickle.UnpicklingError)) or _DAMAGE.search(str(error)) is not None


def _is_known(error: Exception) -> bool:
    """Ours; or a broken connection: another rank is gone, and says why."""
    return isinstance(error, MegaresumeError | dist.DistError) or "gloo" in str(error)


def _words(error: BaseException) -> str:
    # torch's CheckpointException, or an error made of it: rank -> (error, where).
    for failed in (error, error.__cause__):
        for rank, (cause, _) in sorted(getattr(failed, "failures", {}).items()):
            return f"rank {rank}: {_words(cause)}"
    lines = str(error).strip().splitlines() or ["no words"]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _room(directory: Path) -> str:
    with suppress(OSError):
        return f"; {shutil.disk_usage(directory).free / 1e9:,.1f} GB are free in {directory}"
    return ""
