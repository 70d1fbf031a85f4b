"""Do the clocks of the nodes agree? Asked once at the start: the end of a job is a time of day.

    gather   all ranks have met: none is ahead of the others by more than it took
    gather   everybody's time of day, taken after that

What the second one took is the error of the measurement. A rank that was held up in between looks like a clock that is
wrong: a difference is measured again before it is believed.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from megaresume.session.ranks import gather, is_rank_0, known_to_all, world_size
from megaresume.stream.errors import SetupError

#: a difference that is no longer taken for a network's. NTP keeps the clocks of a cluster within milliseconds.
MOST_SECONDS_APART = 5.0
#: how often a difference is measured before it is believed.
_TIMES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    host: str
    #: seconds since 1970.
    now: float
    #: what the gather before this one took.
    took: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Apart:
    """How far the clock of a host is from that of rank 0: seconds; ahead of it where positive."""

    host: str
    seconds: float
    error: float

    def __str__(self) -> str:
        return f"{self.host} is {abs(self.seconds):.1f} s {'ahead' if self.seconds > 0 else 'behind'}"


def check_clocks(*, needed: bool) -> None:
    """Compare the clocks of all ranks. Collective.

    Args:
        needed: whether the run stops by the time of day.

    Raises, on every rank:
        SetupError: they differ, and ``needed``. Where they are not needed, rank 0 prints a warning.
    """
    if world_size() == 1:
        return
    took = _meet()
    found: dict[int, _Apart] = {}
    for _ in range(_TIMES):
        apart, took = _measure(took)
        for rank, one in apart.items():
            found[rank] = min(found.get(rank, one), one, key=lambda measured: abs(measured.seconds))
        # All ranks hold the same readings, and come to the same decision.
        if all(abs(one.seconds) <= MOST_SECONDS_APART for one in found.values()):
            return
    wrong = [one for one in found.values() if abs(one.seconds) > MOST_SECONDS_APART]
    hosts = list({one.host: str(one) for one in wrong}.values())
    shown = ", ".join(hosts[:10]) + (f", and {len(hosts) - 10} more" if len(hosts) > 10 else "")
    error = max(one.error for one in wrong)
    if needed:
        raise known_to_all(_refusal(shown, error))
    if is_rank_0():
        print(
            f"megaresume: WARNING: the clocks of the nodes differ: {shown} (+- {error:.1f} s) of rank 0's on "
            f"{os.uname().nodename}. Times in logs cannot be compared; look at chronyc tracking on these nodes",
            flush=True,
        )


def _refusal(shown: str, error: float) -> SetupError:
    return SetupError(
        "the clocks of the nodes differ, and this run is to stop at a time of day",
        found=f"{shown} (+- {error:.1f} s) of rank 0's",
        expected=f"clocks within {MOST_SECONDS_APART:g} s: which of them the scheduler goes by is not known",
        cause="no NTP on these nodes",
        action="chronyc tracking on these nodes; until then --exit-duration-in-mins MINUTES (after_minutes=), which "
        "needs no clock, in place of --megaresume-stop-before-end (before_end=)",
    )


def _meet() -> float:
    """All ranks are here after it; seconds that it took."""
    began = time.monotonic()
    gather(None)
    return time.monotonic() - began


def _measure(took: float) -> tuple[dict[int, _Apart], float]:
    """Every rank's distance from rank 0, the same on every rank; and what the gather took."""
    began = time.monotonic()
    readings: list[_Reading] = gather(_Reading(host=os.uname().nodename, now=time.time(), took=took))
    first, error = readings[0].now, min(reading.took for reading in readings)
    apart = {
        rank: _Apart(host=reading.host, seconds=reading.now - first, error=error)
        for rank, reading in enumerate(readings)
    }
    return apart, time.monotonic() - began
