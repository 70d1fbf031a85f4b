"""Do the clocks of the nodes agree? Asked once at the start: the end of a job is a time of day.

    gather   all ranks have met: none is ahead of the others by more than it took
    gather   everybody's time of day, taken after that

What the second one took is the error of the measurement. A rank that was held up in between looks like a clock that is
wrong: a difference is measured again before it is believed.
"""

from __future__ import annotations

import os
import time

from megaresume.session.ranks import gather, is_rank_0, known_to_all, world_size
from megaresume.stream.errors import SetupError

#: a difference that is no longer taken for a network's. NTP keeps the clocks of a cluster within milliseconds.
MOST_SECONDS_APART = 5.0
#: how often a difference is measured before it is believed.
_TIMES = 3


def check_clocks(*, needed: bool) -> None:
    """Compare the clocks of all ranks. Collective.

    Args:
        needed: whether the run stops by the time of day.

    Raises, on every rank:
        SetupError: they differ, and ``needed``. Where they are not needed, rank 0 prints a warning.
    """
    if world_size() == 1:
        return
    began = time.monotonic()
    gather(None)
    took = time.monotonic() - began
    # Of every rank: how far its clock is from rank 0's, ahead of it if positive, and its host; the nearest measured.
    nearest: dict[int, tuple[float, str]] = {}
    for _ in range(_TIMES):
        began = time.monotonic()
        hosts, times, all_took = zip(*gather((os.uname().nodename, time.time(), took)), strict=True)
        took = time.monotonic() - began
        for rank, found in enumerate(zip((now - times[0] for now in times), hosts, strict=True)):
            nearest[rank] = min(nearest.get(rank, found), found, key=lambda one: abs(one[0]))
        # All ranks hold the same readings, and come to the same decision.
        apart = {host: seconds for seconds, host in nearest.values() if abs(seconds) > MOST_SECONDS_APART}
        if not apart:
            return
    words = [f"{host} is {abs(s):.1f} s {'ahead' if s > 0 else 'behind'}" for host, s in apart.items()]
    shown = ", ".join(words[:10]) + (f", and {len(words) - 10} more" if len(words) > 10 else "")
    error = min(all_took)
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
