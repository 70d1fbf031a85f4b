"""Times in records: UTC, to the millisecond, readable and sortable as text."""

from __future__ import annotations

import time

__all__ = ["utc"]


def utc(seconds: float) -> str:
    """Seconds since 1970 as ``2025-01-31T23:59:59.123Z``."""
    milliseconds = round(seconds * 1000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{whole}.{milliseconds % 1000:03d}Z"
