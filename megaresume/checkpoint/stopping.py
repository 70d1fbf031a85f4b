"""Stopping in time: signals, a trigger file and a time budget become one decision of all ranks at a step boundary.

    a signal on any rank; or on rank 0: the file exists, the minutes are up, the job's end is near
                -> at the next step boundary all ranks know (one all-reduce)
                -> save -> exit with a chosen status (0)

A handler only records its signal: nothing is saved, printed or freed in the middle of a step, and a second signal does
not affect a save that has begun. Worker processes of our loaders survive the signal (`megaresume.batches.workers`),
because Slurm sends it to them too.

Do the clocks of the nodes agree? Checked once at the start (`check_clocks`), as the end of a job is a time of day:

    gather   all ranks have met: none is ahead of the others by more than this took
    gather   each rank's time of day, taken after that

The duration of the second one is the error of the measurement. A rank that was delayed in between looks like a wrong
clock, so a difference is measured again before it counts.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from megaresume.checkpoint.flags import described, setting
from megaresume.checkpoint.ranks import finished, gather, is_rank_0, known_to_all, world_size
from megaresume.stream.errors import SetupError, UsageError, listed

#: the signals that Slurm and people send before they kill.
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")
#: variables with the end of the job, in seconds since 1970. The first is for schedulers other than Slurm.
END_TIME_VARIABLES = ("MEGARESUME_JOB_END_TIME", "SLURM_JOB_END_TIME")


class Stopped(SystemExit):
    """The run was asked to stop, has saved, and is not finished: ends the process with the status in ``code``."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(status)
        #: what requested it, as a sentence without a full stop.
        self.reason = reason


def minutes_before_end(text: str | float | None) -> float | Literal["auto"] | None:
    """Parse the value of ``--megaresume-stop-before-end``. Raises UsageError."""
    if text is None or text == "auto":
        return None if text is None else "auto"
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(
            "--megaresume-stop-before-end takes minutes, or nothing",
            found=text,
            expected="a number of minutes",
            action="--megaresume-stop-before-end 10, for 10 minutes",
        ) from error


@described
@dataclass(frozen=True, kw_only=True, slots=True)
class StopConditions:
    """When to save and exit; any one condition is enough.

    Raises:
        UsageError: an unknown signal, an impossible time or status, or an unknown end of the job.
    """

    signals: tuple[str, ...] = setting(SIGNALS, "signals to listen to; under Megatron: --exit-signal-handler")
    file: str | os.PathLike[str] | None = setting(
        None,
        "save and exit when this file appears; the run removes it",
        hosts="megatron trainer training",
        flag="stop-file",
        metavar="FILE",
    )
    after_minutes: float | None = setting(
        None, "save and exit this many minutes after the process began; under Megatron: --exit-duration-in-mins"
    )
    before_end: float | Literal["auto"] | None = setting(
        None,
        "save and exit this many minutes before the end of the Slurm job (elsewhere: $MEGARESUME_JOB_END_TIME). "
        "Without a number, 1.5 times the last save and 2 steps before it",
        hosts="megatron trainer training",
        flag="stop-before-end",
        type=minutes_before_end,
        nargs="?",
        const="auto",
        metavar="MINUTES",
    )
    status: int = setting(
        0, "exit status of a run that was asked to stop, and saved", hosts="trainer training", flag="stop-status"
    )

    def __post_init__(self) -> None:
        for name in self.signals:
            if not isinstance(getattr(signal, name, None), signal.Signals) or name in ("SIGKILL", "SIGSTOP"):
                raise UsageError(
                    "this is not a signal that a process can catch",
                    found=name,
                    expected=f"names such as {', '.join(SIGNALS)}",
                    action="name another one",
                )
        for what, minutes in (("after_minutes", self.after_minutes), ("before_end", self.before_end)):
            if minutes is not None and minutes != "auto" and not 0 <= minutes < math.inf:
                raise UsageError(
                    "this is not a time",
                    found=f"{what}={minutes}",
                    expected="minutes, 0 or more",
                    action=f"pass minutes, or leave {what} out",
                )
        if not 0 <= self.status <= 255:
            # The system keeps the lowest 8 bits: 256 would be 0.
            raise UsageError("this is not an exit status", found=self.status, expected="0 to 255", action="such as 75")
        if self.before_end is not None and job_end(os.environ) is None:
            raise UsageError(
                "the end of the job is not known",
                found=" and ".join(_value(name) for name in END_TIME_VARIABLES),
                expected="seconds since 1970, as Slurm gives them to a job with a time limit",
                cause="this is not a Slurm job, or one without a time limit",
                action="after_minutes= (Megatron: --exit-duration-in-mins); or set MEGARESUME_JOB_END_TIME in the "
                "launch script",
            )

    def __bool__(self) -> bool:
        return bool(self.signals) or any(
            condition is not None for condition in (self.file, self.after_minutes, self.before_end)
        )


def _value(name: str) -> str:
    return f"${name} is {os.environ[name]!r}" if name in os.environ else f"no ${name}"


def job_end(environment: Mapping[str, str]) -> float | None:
    """When the scheduler will end this job, in seconds since 1970; None if unknown, or not a time."""
    for name in END_TIME_VARIABLES:
        text = environment.get(name, "")
        if text.isascii() and text.isdigit():
            return float(text)
    return None


#: seconds assumed for a save that was never measured.
UNKNOWN_SAVE = 300.0

log = logging.getLogger(__name__)


class Stopper:
    """Listens on one rank, and asks all ranks at step boundaries.

    Args:
        conditions: when to stop.
        save_seconds: returns the measured duration of a save; None before the first. Called on rank 0.
    """

    def __init__(self, conditions: StopConditions, *, save_seconds: Callable[[], float | None]) -> None:
        self.conditions = conditions
        self._save_seconds = save_seconds
        self._began = time.monotonic()
        self._end = job_end(os.environ)
        self._received: list[str] = []
        self._replaced: dict[signal.Signals, Any] = {}
        self._warned = False
        #: whether all ranks have agreed to stop.
        self.stopping = False
        # Seconds between the last boundaries: how late the next one may come.
        self._boundaries: deque[float] = deque(maxlen=16)

    def install(self) -> None:
        """Listen to the signals from now on. In the main thread; a second call does nothing.

        Raises:
            UsageError: this is not the main thread.
        """
        if self._replaced or not self.conditions.signals:
            return
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "only the main thread can listen to signals",
                found=f"thread {threading.current_thread().name}",
                action="call megaresume.attach in the main thread, or pass StopConditions(signals=())",
            )
        for name in self.conditions.signals:
            number = signal.Signals[name]
            self._replaced[number] = signal.signal(number, self._note)

    def uninstall(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced.clear()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        self._received.append(name)
        # No print: a handler may interrupt a print. One write is safe; its reader may have been killed by the same
        # signal.
        more = "again: nothing changes" if len(self._received) > 1 else "this process saves and exits at the step's end"
        with contextlib.suppress(OSError):
            os.write(2, f"megaresume: {name} received, {more}\n".encode())

    def reason(self) -> str | None:
        """Why this rank alone would stop now; None if it would not."""
        if self._received:
            return f"{self._received[0]} received"
        if not is_rank_0():
            return None  # clocks differ, and not every node sees the same files at the same time
        conditions = self.conditions
        # Not Path.exists, which raises if it may not look: that would leave the other ranks waiting.
        if conditions.file is not None and os.path.exists(conditions.file):
            return f"{conditions.file} is there"
        minutes = (time.monotonic() - self._began) / 60
        if conditions.after_minutes is not None and minutes >= conditions.after_minutes:
            return f"{conditions.after_minutes:g} minutes are up"
        if conditions.before_end is not None and (left := self.seconds_left()) is not None and left <= self._margin():
            return f"{max(left, 0):.0f} s are left of the job"
        return None

    def look(self) -> str | None:
        """At a step boundary: why this rank alone would stop. The caller must ask the others; see `agreed`."""
        self._boundaries.append(time.monotonic())
        return self.reason()

    def stops(self, answer: bool) -> bool:
        """Record what all ranks agreed on, and warn if it comes too late."""
        self.stopping = answer
        self._warn(answer)
        return answer

    def agreed(self) -> str | None:
        """Why all ranks stop here; None if they continue. A collective, at a step boundary."""
        mine = self.look()
        stops = mine is not None
        if world_size() > 1:
            import torch
            import torch.distributed as dist

            device = "cuda" if "nccl" in dist.get_backend() else "cpu"
            anybody = torch.tensor([stops], dtype=torch.int32, device=device)
            finished(dist.all_reduce(anybody, op=dist.ReduceOp.MAX, async_op=True), anybody)
            stops = bool(anybody.item())
        if not self.stops(stops):
            return None
        found = [(rank, reason) for rank, reason in enumerate(gather(mine)) if reason is not None]
        rank, reason = found[0]
        return reason if rank == 0 else f"{reason} on rank {rank}"

    def seconds_left(self) -> float | None:
        """Seconds until the scheduler ends the job."""
        return None if self._end is None else self._end - time.time()

    def _margin(self) -> float:
        """Seconds before the end at which the last save must begin."""
        given = self.conditions.before_end
        if given is not None and given != "auto":
            return 60.0 * given
        times = list(self._boundaries)
        longest = max((after - before for before, after in pairwise(times)), default=0.0)
        # Durations vary on shared storage; and one more step must fit, since this is only checked at boundaries.
        return 1.5 * (self._save_seconds() or UNKNOWN_SAVE) + 2 * longest

    def _warn(self, stops: bool) -> None:
        left = self.seconds_left()
        if self._warned or left is None or not is_rank_0():
            return
        save = self._save_seconds()
        if save is not None and left < save:
            self._warned = True
            log.warning(
                "megaresume: %.0f s are left of this job and a save takes %.0f s: %s. Stop earlier: "
                "--megaresume-stop-before-end, or a signal that comes sooner (sbatch --signal=USR1@%d)",
                max(left, 0),
                save,
                "the save that begins now may be cut off" if stops else "nothing more can be saved",
                2 * round(save) + 60,
            )

    def saved(self) -> None:
        """Remove the trigger file after the checkpoint is saved, or the next start would stop at once."""
        file = self.conditions.file
        if file is None or not is_rank_0():
            return
        try:
            Path(file).unlink(missing_ok=True)
        except OSError as error:
            log.warning(
                "megaresume: %s cannot be removed (%s): as long as it is there, every start stops at its first step",
                file,
                error.strerror or error,
            )


#: a larger difference is not due to the network. NTP keeps the clocks of a cluster within milliseconds.
MOST_SECONDS_APART = 5.0
#: how often a difference is measured before it counts.
_TIMES = 3


def check_clocks(*, needed: bool) -> None:
    """Compare the clocks of all ranks. Collective.

    Args:
        needed: whether the run stops at a time of day.

    Raises, on every rank:
        SetupError: they differ, and ``needed``. If not needed, rank 0 prints a warning instead.
    """
    if world_size() == 1:
        return
    began = time.monotonic()
    gather(None)
    took = time.monotonic() - began
    # For every rank: host, and how far its clock is ahead of rank 0's; the smallest difference measured.
    nearest: dict[int, tuple[float, str]] = {}
    for _ in range(_TIMES):
        began = time.monotonic()
        hosts, times, all_took = zip(*gather((os.uname().nodename, time.time(), took)), strict=True)
        took = time.monotonic() - began
        for rank, found in enumerate(zip((now - times[0] for now in times), hosts, strict=True)):
            nearest[rank] = min(nearest.get(rank, found), found, key=lambda one: abs(one[0]))
        # All ranks have the same readings, and so make the same decision.
        apart = {host: seconds for seconds, host in nearest.values() if abs(seconds) > MOST_SECONDS_APART}
        if not apart:
            return
    words = [f"{host} is {abs(s):.1f} s {'ahead' if s > 0 else 'behind'}" for host, s in apart.items()]
    shown = listed(words, 10)
    error = min(all_took)
    if needed:
        raise known_to_all(_clock_refusal(shown, error))
    if is_rank_0():
        print(
            f"megaresume: WARNING: the clocks of the nodes differ: {shown} (+- {error:.1f} s) of rank 0's on "
            f"{os.uname().nodename}. Times in logs cannot be compared; look at chronyc tracking on these nodes",
            flush=True,
        )


def _clock_refusal(shown: str, error: float) -> SetupError:
    return SetupError(
        "the clocks of the nodes differ, and this run is to stop at a time of day",
        found=f"{shown} (+- {error:.1f} s) of rank 0's",
        expected=f"clocks within {MOST_SECONDS_APART:g} s: it is not known which one the scheduler uses",
        cause="no NTP on these nodes",
        action="chronyc tracking on these nodes; until then --exit-duration-in-mins MINUTES (after_minutes=), which "
        "needs no clock, in place of --megaresume-stop-before-end (before_end=)",
    )
