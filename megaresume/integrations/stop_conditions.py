"""When to save and exit: signals, a trigger file, a time budget. What users say; `stopping` is what comes of it.

Without torch: flags are checked before it is imported.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megaresume.integrations.flags import described, setting
from megaresume.stream.errors import UsageError

__all__ = ["END_TIME_VARIABLES", "SIGNALS", "StopConditions", "Stopped", "job_end", "minutes_before_end"]

#: what Slurm and people send before they kill.
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")
#: where the end of the job is looked for: seconds since 1970. The first is for schedulers other than Slurm.
END_TIME_VARIABLES = ("MEGARESUME_JOB_END_TIME", "SLURM_JOB_END_TIME")


class Stopped(SystemExit):
    """The run was asked to stop, saved, and is not over: ends the process with the status in ``code``."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(status)
        #: what asked for it, as a sentence without a full stop.
        self.reason = reason


def minutes_before_end(text: str | float | None) -> float | Literal["auto"] | None:
    """What follows ``--megaresume-stop-before-end``. Raises UsageError."""
    if text is None or text == "auto":
        return None if text is None else "auto"
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(
            "--megaresume-stop-before-end takes minutes, or nothing",
            found=text,
            expected="a number of minutes",
        ) from error


@described
@dataclass(frozen=True, kw_only=True, slots=True)
class StopConditions:
    """When to save and exit. Any of them is enough.

    Raises:
        UsageError: an unknown signal, an impossible time or status, or an end of the job that nobody tells.
    """

    signals: tuple[str, ...] = setting(SIGNALS, "names of signals to listen to")
    file: str | None = setting(
        None,
        "save and exit when this file appears; it is removed then",
        hosts="megatron training",
        flag="stop-file",
        metavar="FILE",
    )
    after_minutes: float | None = setting(None, "save and exit so many minutes after the process began")
    before_end: float | Literal["auto"] | None = setting(
        None,
        "save and exit so many minutes before the end of the Slurm job ($MEGARESUME_JOB_END_TIME); without a number: "
        "as long before as a save was measured to take",
        hosts="megatron training",
        flag="stop-before-end",
        type=minutes_before_end,
        nargs="?",
        const="auto",
        metavar="MINUTES",
    )
    status: int = setting(
        0, "exit status of a run that was asked to stop and saved", hosts="training", flag="stop-status"
    )

    def __post_init__(self) -> None:
        for name in self.signals:
            if not isinstance(getattr(signal, name, None), signal.Signals) or name in ("SIGKILL", "SIGSTOP"):
                raise UsageError(
                    "this is no signal that a process can catch",
                    found=name,
                    expected=f"names such as {', '.join(SIGNALS)}",
                    action="name another one",
                )
        for what, minutes in (("after_minutes", self.after_minutes), ("before_end", self.before_end)):
            if isinstance(minutes, (int, float)) and not 0 <= minutes < math.inf:
                raise UsageError("this is no time", found=f"{what}={minutes}", expected="minutes, 0 or more")
        if not 0 <= self.status <= 255:
            # The system keeps the last 8 bits: 256 would be 0.
            raise UsageError("this is no exit status", found=self.status, expected="0 to 255", action="such as 75")
        if self.before_end is not None and job_end(os.environ) is None:
            raise UsageError(
                "the end of the job is not known",
                found=" and ".join(_value(name) for name in END_TIME_VARIABLES),
                expected="seconds since 1970, as Slurm gives them to a job with a time limit",
                cause="this is no Slurm job, or one without a time limit",
                action="--exit-duration-in-mins MINUTES; or set MEGARESUME_JOB_END_TIME in the launch script",
            )

    def __bool__(self) -> bool:
        return bool(self.signals) or any(
            condition is not None for condition in (self.file, self.after_minutes, self.before_end)
        )


def _value(name: str) -> str:
    return f"${name} is {os.environ[name]!r}" if name in os.environ else f"no ${name}"


def job_end(environment: Mapping[str, str]) -> float | None:
    """When the scheduler will end this job, in seconds since 1970; None: nobody says, or something that is no time."""
    for name in END_TIME_VARIABLES:
        text = environment.get(name, "")
        if text.isascii() and text.isdigit():
            return float(text)
    return None
