"""Turns a framework's error about checkpoint files into one that names the checkpoint and the next action.

"PytorchStreamReader failed reading zip archive" does neither. A rank that fails inside a framework is alone with its
error: the others wait in a collective, and its launcher ends them.
"""

from __future__ import annotations

import errno
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.meetings import FailedElsewhereError, Failure, LostRankError, Meeting
from megaresume.checkpoint.ranks import is_known_to_all, known_to_all
from megaresume.files import CAUSES
from megaresume.stream.errors import CheckpointError, MegaresumeError

T = TypeVar("T")


@contextmanager
def writing(tag_dir: Path) -> Iterator[None]:
    """Wrap a host's save. Raises CheckpointError instead of the errors inside."""
    try:
        yield
    except Exception as error:
        if _is_known(error):
            raise
        if (of_disk := _of_disk(error)) is None:
            raise CheckpointError(
                f"the checkpoint {tag_dir.name} could not be written; the pointers stay as they were",
                found=_words(error),
                cause="what is to be saved, or a function of yours that is called in a save, raises this",
                action="correct what the traceback names, and start again: checkpoints before this one are kept",
            ) from error
        raise CheckpointError(
            f"the files of the checkpoint {tag_dir.name} could not be written; the pointers stay as they were",
            found=_words(error) + _room(tag_dir.parent),
            expected=f"room and permission to write in {tag_dir}",
            cause=of_disk[0],
            action=f"{of_disk[1]}; then start again: checkpoints before this one are untouched",
        ) from error


@contextmanager
def reading(choice: Choice) -> Iterator[None]:
    """Wrap a host's load of a choice. Raises CheckpointError instead of the errors inside."""
    try:
        yield
    except Exception as error:
        if _is_known(error):
            raise
        unreadable = _unreadable(choice, _words(error))
        raise known_to_all(unreadable) if is_known_to_all(error) else unreadable from error


def _unreadable(choice: Choice, found: str) -> CheckpointError:
    summed = choice.manifest is not None and choice.manifest.has_checksums
    return CheckpointError(
        f"the checkpoint {choice.tag} cannot be read, although every file is there",
        found=found,
        expected=f"the files in {choice.tag_dir} as they were saved, for this model and this parallel layout",
        cause="the storage returns other bytes than were written; or the model, or its config, was changed",
        action=f"megaresume inspect {choice.load_dir} --checksums names damaged files"
        + ("" if summed else ", in checkpoints that were saved with checksums (the default)")
        + "; to resume from an older one, ask for its tag",
    )


class DamagedError(CheckpointError):
    """Raised on all ranks if one cannot read files of a checkpoint: an older one may be intact."""

    tag_dir: Path


def read_undamaged(read: Callable[[Mapping[Path, str]], T]) -> T:
    """Call ``read`` on every rank until nothing is damaged: it gets the tag directories that could not be read, with
    the reasons, and must skip them. Raises what ``read`` does.
    """
    damaged: dict[Path, str] = {}
    while True:
        try:
            return read(damaged)
        except DamagedError as error:
            if error.tag_dir in damaged:
                raise
            damaged[error.tag_dir] = f"{error.headline} ({error.found})"


class OtherSaveError(Exception):
    """Raised if a file of a checkpoint, with the right name and size, was written by another save."""


#: errors of torch, and of the formats that it uses, for a file that is not as it was written.
_DAMAGE = re.compile(
    r"PytorchStreamReader|zip archive|unpickl|pickle data|invalid load key|Ran out of input|corrupt", re.I
)


def read_on_all_ranks(read: Callable[[], T], choice: Choice, meeting: Meeting | None = None) -> T:
    """Run a framework's load, on every rank.

    Args:
        read: the load.
        choice: what it loads.
        meeting: ``read`` waits at its gates before the framework's collectives; None: it does not. Then a rank inside
            one of them only learns of a failure when that ends.

    Raises, on every rank:
        DamagedError: a rank could not read a file whose checksum had not been verified.
        CheckpointError: a rank failed for another reason; that rank raises its own error.
        LostRankError: a rank has ended.
    """
    meeting = meeting or Meeting("load_checkpoint()")
    value: T | None = None
    error: Exception | None = None
    try:
        value = read()
    except FailedElsewhereError:
        pass
    except LostRankError:
        raise
    except Exception as problem:  # noqa: BLE001  raised below
        error = problem
        meeting.fail(Failure(words=_words(problem), is_final=not is_damage(problem, choice)))
    failure = meeting.end()
    if failure is None:
        return value  # type: ignore[return-value]
    if failure.is_final:
        raise known_to_all(_unreadable(choice, failure.words) if error is None else error)
    damage = DamagedError(f"{choice.tag} cannot be read, although every file is there", found=failure.words)
    damage.tag_dir = choice.tag_dir
    raise known_to_all(damage) from error


def is_damage(error: BaseException, choice: Choice) -> bool:
    """Whether an error of a framework's load means that a file is not as it was written."""
    if isinstance(error, OtherSaveError) or (isinstance(error, OSError) and error.errno == errno.EIO):
        return True
    if choice.manifest is not None and choice.manifest.has_checksums:
        return False  # verified: it is the model that does not fit
    if isinstance(error, (EOFError, pickle.UnpicklingError)) or _DAMAGE.search(str(error)) is not None:
        return True
    return isinstance(error, _OF_PICKLES) and _raised_in(error) == "torch.serialization"


#: what an unpickler also raises for damaged bytes, depending on what it takes them for.
_OF_PICKLES = (ValueError, LookupError, OverflowError, TypeError)


def _raised_in(error: BaseException) -> str | None:
    """The module in which an error was raised."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return None if place is None else place.tb_frame.f_globals.get("__name__")


#: how torch's writer of files, and libraries in other languages, name an error of the system.
_OF_DISK = re.compile(r"PytorchStreamWriter|inline_container|iostream error|Parent directory|os error [0-9]|I/O error")


#: the cause and the next action if an error does not say which one of the system's it is.
_ANY_OF_DISK = (
    "the disk is full, the quota or a limit (ulimit -f) is used up, or the filesystem has become read-only",
    "make room, or save elsewhere",
)


def _of_disk(error: BaseException | None) -> tuple[str, str] | None:
    """The likely cause, and the next action, if an error of a save, or what it was raised from, is the system's about a
    file.
    """
    if error is None:
        return None
    if isinstance(error, OSError):
        return CAUSES.get(error.errno or 0)
    inner = (cause for cause, _ in getattr(error, "failures", {}).values())
    found = next(filter(None, map(_of_disk, (*inner, error.__cause__ or error.__context__))), None)
    return found or (_ANY_OF_DISK if _OF_DISK.search(str(error)) else None)


def _is_known(error: Exception) -> bool:
    """Whether an error explains itself: ours, or a lost connection, which the rank that is gone explains."""
    dist = sys.modules.get("torch.distributed")
    is_broken = dist is not None and isinstance(error, dist.DistError)
    return isinstance(error, MegaresumeError) or is_broken or "gloo" in str(error)


def _words(error: BaseException) -> str:
    # torch's CheckpointException, or an error made from it: rank -> (error, where).
    for failed in (error, error.__cause__):
        for number, (cause, _) in sorted(getattr(failed, "failures", {}).items()):
            return f"rank {number}: {_words(cause)}"
    lines = str(error).strip().splitlines() or ["no words"]
    # torch names the keys that do not fit below the first line.
    words = " ".join(map(str.strip, lines[:2])) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {words[:300]}"


def _room(directory: Path) -> str:
    with suppress(OSError):
        return f"; {shutil.disk_usage(directory).free / 1e9:,.1f} GB are free in {directory}"
    return ""
