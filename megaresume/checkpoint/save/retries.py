"""`Retries`: a save that fails for a reason that may pass is retried by all ranks together.

    save fails on any rank -> all ranks know it -> may it pass?  no   the error, on every rank
                                                                yes  wait, save again: 15 s, 30 s, 60 s
    the last retry has failed                                the error; or the run continues without this checkpoint

A copy to a second storage is not part of a save, and is retried separately by `megaresume.checkpoint.copies.stager`; a
request to an object store by `megaresume.data.remote`.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from megaresume.checkpoint.ranks import gather, is_known_to_all, is_rank_0, on_rank_0
from megaresume.stream.errors import MegaresumeError, UsageError

T = TypeVar("T")

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
#: errors of torch's writers, which do not pass on the system's number.
_WRITERS_WORDS = ("PytorchStreamWriter failed", "iostream error", "unexpected pos ")


def may_pass(error: BaseException) -> bool:
    """Whether the same save may succeed later: the error, or one that caused it, is of a kind that passes."""
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
    """How often a failed save is retried, and what happens after that.

    Raises:
        UsageError: a negative number, or an unknown word.
    """

    #: number of retries.
    tries: int = 0
    #: seconds before the first retry, doubled each time.
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
        """Run a save, and retry it if it fails. On every rank.

        Args:
            save: saves once.
            tag: the tag that it saves.
            is_last: the run is about to stop, so it does not continue without this checkpoint.
            seconds_left: returns the seconds until the job ends, if known; called on rank 0.
            give_up: called on every rank after the last retry: undoes what exists of the save.

        Returns:
            the result of ``save``; None if it failed, and the run is to continue.

        Raises:
            the error of the last attempt.
        """
        for number in range(1 + self.tries):
            wait = None
            try:
                return save()
            except Exception as error:
                # An error known only to this rank ends its process: the others may wait for it anywhere.
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
                    with suppress(MegaresumeError):
                        give_up()
                    raise
            # Only here: until then, the error refers to the data to be written.
            if wait is None:
                break
            time.sleep(wait)
        give_up()
        return None

    def _time_for(self, number: int, seconds_left: float | None) -> float | None:
        """Seconds until the next retry; None if the job ends before that."""
        wait = self.wait * 2**number
        return wait if seconds_left is None or wait < seconds_left else None


def _reason(error: Exception) -> str:
    headline, found = (error.headline, error.found) if isinstance(error, MegaresumeError) else (str(error), None)
    return headline if found is None else f"{headline} ({found})"
