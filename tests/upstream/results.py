"""What was tried and what came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One thing that was tried on one upstream."""

    upstream: str
    what: str
    #: refused: it is not supported, and was told so, as it should be.
    status: Literal["ok", "failed", "not run", "refused"]
    #: why it failed or was not run; or what is worth knowing.
    detail: str = ""
    seconds: float = 0.0

    @classmethod
    def of(cls, upstream: str, what: str, wrong: str | None, seconds: float = 0.0) -> Result:
        """A failure, if something is wrong."""
        return cls(
            upstream=upstream,
            what=what,
            status="ok" if wrong is None else "failed",
            detail=wrong or "",
            seconds=seconds,
        )

    @classmethod
    def failed(cls, upstream: str, what: str, why: str, seconds: float = 0.0) -> Result:
        """A failure."""
        return cls(upstream=upstream, what=what, status="failed", detail=why, seconds=seconds)

    @classmethod
    def not_run(cls, upstream: str, what: str, why: str) -> Result:
        """Something that this machine cannot run."""
        return cls(upstream=upstream, what=what, status="not run", detail=why)
