"""Failures of a checkpoint's files: what they mean, what to do, whether to try again, and which files are damaged.

What a framework and torch say of a file ("PytorchStreamReader failed reading zip archive") names neither checkpoint
nor way out. A rank that fails inside a framework is alone with it: the others wait in a collective, and its launcher
ends them.

The files that are loaded are compared with those that were saved, wherever they are read; all machines do it together:

    every directory    of the tag, by machine and by what is mounted there; its lowest rank works for it
    the same files?    by size and time of change, as rank 0 sees them: a shared filesystem
    together           who sees the same files shares them; a directory of its own (a local copy) is compared as a whole

A save that fails for a reason that may pass is tried again, by all ranks together; then the run continues, or ends:

    save fails on any rank -> all ranks know it -> may it pass?  no   the error, on every rank
                                                                yes  wait, save again: 15 s, 30 s, 60 s
    the last try has failed                                  the error; or the run continues without this checkpoint
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, get_args

from megaresume.checkpoint import system
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import (
    FailedElsewhereError,
    Failure,
    LostRankError,
    Meeting,
    gather,
    is_known_to_all,
    is_rank_0,
    known_to_all,
    on_all_ranks,
    on_all_ranks_for_long,
    on_rank_0,
    rank,
)
from megaresume.checkpoint.records.manifest import FileEntry, Manifest, verify_files
from megaresume.files import read_error
from megaresume.stream.errors import CheckpointError, MegaresumeError, UsageError

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


class OtherSaveError(Exception):
    """A file of a checkpoint, of the right name and size, was written by another save."""


#: what torch and the formats below it say of a file that is not what was written.
_DAMAGE = re.compile(
    r"PytorchStreamReader|zip archive|unpickl|pickle data|invalid load key|Ran out of input|corrupt", re.I
)


def read_on_all_ranks(read: Callable[[], T], choice: Choice, meeting: Meeting | None = None) -> T:
    """Run a framework's load. On every rank.

    Args:
        read: the load.
        choice: what it loads.
        meeting: at whose gates ``read`` waits before the framework's collectives; None: at none. Then a rank that is
            in one of them learns of a failure only when that ends.

    Raises, on every rank:
        DamagedError: a rank could not read a file whose checksum was not compared before.
        CheckpointError: a rank failed for another reason; what it was is raised on that rank.
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
    """Whether an error of a framework's load says that a file is not what was written."""
    if isinstance(error, OtherSaveError) or (isinstance(error, OSError) and error.errno == errno.EIO):
        return True
    if choice.manifest is not None and choice.manifest.has_checksums:
        return False  # compared: it is the model that does not fit
    if isinstance(error, (EOFError, pickle.UnpicklingError)) or _DAMAGE.search(str(error)) is not None:
        return True
    return isinstance(error, _OF_PICKLES) and _raised_in(error) == "torch.serialization"


#: what an unpickler also raises of other bytes, by the kind of what it takes them for.
_OF_PICKLES = (ValueError, LookupError, OverflowError, TypeError)


def _raised_in(error: BaseException) -> str | None:
    """The module in which an error was raised."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return None if place is None else place.tb_frame.f_globals.get("__name__")


def _is_known(error: Exception) -> bool:
    """Whether an error explains itself: ours, or a lost connection, of which the rank that is gone says why."""
    dist = sys.modules.get("torch.distributed")
    is_broken = dist is not None and isinstance(error, dist.DistError)
    return isinstance(error, MegaresumeError) or is_broken or "gloo" in str(error)


def _words(error: BaseException) -> str:
    # torch's CheckpointException, or an error made of it: rank -> (error, where).
    for failed in (error, error.__cause__):
        for number, (cause, _) in sorted(getattr(failed, "failures", {}).items()):
            return f"rank {number}: {_words(cause)}"
    lines = str(error).strip().splitlines() or ["no words"]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _room(directory: Path) -> str:
    with suppress(OSError):
        return f"; {shutil.disk_usage(directory).free / 1e9:,.1f} GB are free in {directory}"
    return ""


#: from this many bytes on, a start logs what it waits for.
_MUCH = 10e9

#: of every file: its size and the time of its last change in nanoseconds, which no copy keeps; None if it is not there.
_Stats = list[tuple[int, int] | None]


def find_damage(choice: Choice) -> str | None:
    """Compare the files of a chosen checkpoint with its manifest, where they will be read. Collective.

    Returns:
        what is wrong, in words, the same on every rank; None: nothing.

    Raises, on every rank:
        CheckpointError: a rank does not see the directory, or gives no sign of life.
    """
    manifest = choice.manifest
    if manifest is None:
        return None
    places = gather(on_all_ranks(lambda: _place(choice.tag_dir)))
    distinct = list(dict.fromkeys(places))
    mine = distinct.index(places[rank()])
    works = places.index(places[rank()]) == rank()
    stats = on_rank_0(lambda: _stats(choice.tag_dir, manifest))
    same = gather(works and _stats(choice.tag_dir, manifest) == stats)
    sharing = [number for number, place in enumerate(distinct) if same[places.index(place)]]
    if is_rank_0() and manifest.size >= _MUCH:
        print(f"megaresume: comparing the checksums of {choice.tag}, {manifest.size / 1e9:,.0f} GB", flush=True)

    def compare(beat: Callable[[], None]) -> str | None:
        if not works:
            return None
        files = manifest.files
        if mine in sharing:
            files = _shares(files, len(sharing))[sharing.index(mine)]
        problems = verify_files(choice.tag_dir, files, mode="checksums", progress=lambda _size: beat())
        return "; ".join(map(str, problems[:5])) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")

    found = gather(on_all_ranks_for_long(compare, "compared checksums"))
    wrong = next((number for number, words in enumerate(found) if words), None)
    if wrong is None:
        return None
    where = "" if len(distinct) == 1 else f"as rank {wrong} sees it, on {gather(os.uname().nodename)[wrong]}: "
    return f"{where}{found[wrong]}"


def _place(tag_dir: Path) -> tuple[str, int, int]:
    """See `system.identity_of`. Raises CheckpointError."""
    try:
        return system.identity_of(tag_dir)
    except OSError as error:
        raise read_error(tag_dir, error) from error


def _stats(tag_dir: Path, manifest: Manifest) -> _Stats:
    def one(entry: FileEntry) -> tuple[int, int] | None:
        try:
            stat = os.stat(os.path.join(tag_dir, entry.path))
        except OSError:
            return None
        return stat.st_size, stat.st_ctime_ns

    return [one(entry) for entry in manifest.files]


def _shares(files: Sequence[FileEntry], number: int) -> list[tuple[FileEntry, ...]]:
    """Split files into parts of about the same size in bytes."""
    parts: list[list[FileEntry]] = [[] for _ in range(number)]
    sizes = [0] * number
    for entry in sorted(files, key=lambda entry: -entry.size):
        least = sizes.index(min(sizes))
        parts[least].append(entry)
        sizes[least] += entry.size
    return [tuple(part) for part in parts]


OnSaveFailure = Literal["end", "continue"]

#: a disk or quota that somebody is cleaning up, a device that hiccups, a server that is away.
_MAY_PASS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EREMOTEIO,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
    }
)
#: of torch's writers, which keep the system's number to themselves.
_WRITERS_WORDS = ("PytorchStreamWriter failed", "iostream error", "unexpected pos ")


def may_pass(error: BaseException) -> bool:
    """Whether the same save may work later: the error, or one behind it, is of a kind that passes."""
    return any(
        one.errno in _MAY_PASS
        if isinstance(one, OSError)
        else isinstance(one, RuntimeError) and any(words in str(one) for words in _WRITERS_WORDS)
        for one in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How often a failed save is tried again, and what happens after that.

    Raises:
        UsageError: a negative number, or an unknown word.
    """

    #: after the first try.
    tries: int = 0
    #: seconds before the first of them, doubled each time.
    wait: float = 15.0
    on_failure: OnSaveFailure = "end"

    def __post_init__(self) -> None:
        if self.on_failure not in get_args(OnSaveFailure):
            raise UsageError(
                "unknown answer to a save that fails",
                found=f"on_save_failure={self.on_failure}",
                expected=f"one of {', '.join(get_args(OnSaveFailure))}",
                action="on_save_failure='end' raises the error of a save; 'continue' carries on to the next save",
            )
        for name, value in (("save_retries", self.tries), ("save_retry_wait", self.wait)):
            if not 0 <= value < float("inf"):
                raise UsageError(
                    "a save cannot be retried with these settings",
                    found=f"{name}={value}",
                    expected="0 or more",
                    action=f"{name}=0 or more; save_retries=0 for no retry",
                )

    def run(
        self,
        save: Callable[[], T],
        *,
        tag: str,
        is_last: bool,
        seconds_left: Callable[[], float | None],
        give_up: Callable[[], None],
    ) -> T | None:
        """Run a save, and try again if it fails. On every rank.

        Args:
            save: once.
            tag: that it saves.
            is_last: the run is about to stop: it does not continue without this checkpoint.
            seconds_left: until the job ends, if that is known; asked on rank 0.
            give_up: on every rank, after the last try: undoes what is there of it.

        Returns:
            what ``save`` does; None if it failed, and the run is to continue.

        Raises:
            whatever the last try raised.
        """
        for number in range(1 + self.tries):
            wait = None
            try:
                return save()
            except Exception as error:
                # What this rank alone knows ends its process: the others may wait for it anywhere.
                if not is_known_to_all(error) or not any(gather(may_pass(error))):
                    raise
                if number < self.tries:
                    wait = on_rank_0(lambda: self._time_for(number, seconds_left()))  # noqa: B023  runs here
                ends = wait is None and (is_last or self.on_failure == "end")
                then = f"try {number + 1} of {self.tries} in {wait:g} s" if wait is not None else "the run "
                if wait is None:
                    then += "ends" if ends else "continues without this checkpoint"
                if is_rank_0():
                    print(f"megaresume: {tag} was not saved: {_reason(error)}; {then}", flush=True)
                if ends:
                    with contextlib.suppress(MegaresumeError):
                        give_up()
                    raise
            # Only here: the error holds what was to be written.
            if wait is None:
                break
            time.sleep(wait)
        give_up()
        return None

    def _time_for(self, number: int, seconds_left: float | None) -> float | None:
        """Seconds until the next try; None if the job ends before that."""
        wait = self.wait * 2**number
        return wait if seconds_left is None or wait < seconds_left else None


def _reason(error: Exception) -> str:
    headline, found = (error.headline, error.found) if isinstance(error, MegaresumeError) else (str(error), None)
    return headline if found is None else f"{headline} ({found})"


def compared(tag: str, manifest: Manifest) -> str:
    """What was compared before a load, in words."""
    num = len(manifest.files)
    if manifest.has_checksums:
        return f"checksums compared: {num} files of {tag}"
    if manifest.durable:
        return f"checksums not compared: {tag} was saved without; sizes compared: {num} files"
    if some := sum(entry.checksum is not None for entry in manifest.files):
        return (
            f"checksums compared: {some} of {num} files of {tag}; the run ended before those of the others were taken; "
            "their sizes compared"
        )
    return f"checksums not compared: the run ended before those of {tag} were taken; sizes compared: {num} files"
