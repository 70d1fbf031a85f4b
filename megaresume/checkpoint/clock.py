"""Times in records: UTC, to the millisecond, readable and sortable as text; how long this process has been there."""

from __future__ import annotations

import os
import time

from megaresume.checkpoint.proc import stat_fields

__all__ = ["process_age", "utc"]


def utc(seconds: float) -> str:
    """Seconds since 1970 as ``2025-01-31T23:59:59.123Z``."""
    milliseconds = round(seconds * 1000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{whole}.{milliseconds % 1000:03d}Z"


def process_age() -> float | None:
    """Seconds since this process was started; None where the system does not tell (it is no Linux).

    Field 22 of ``/proc/self/stat``, see proc_pid_stat(5): clock ticks from the start of the system to that of the
    process.
    """
    try:
        started = int(stat_fields("self")[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)
    except (OSError, ValueError, IndexError, AttributeError):
        return None
