"""`Finding`: something that whoever launches the run should know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from megaresume.stream.errors import MegaresumeError

__all__ = ["Finding", "attempt"]

T = TypeVar("T")

#: refused: the launch would stop with this. warning: it would run, and probably not as it is meant. note: just so.
Kind = Literal["refused", "warning", "note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Fields as in `MegaresumeError`."""

    kind: Kind
    headline: str
    found: str | None = None
    expected: str | None = None
    cause: str | None = None
    #: the flag or command that solves it.
    action: str | None = None

    @classmethod
    def of(cls, error: MegaresumeError, kind: Kind = "refused") -> Finding:
        """What an error says."""
        return cls(
            kind=kind,
            headline=error.headline,
            found=None if error.found is None else str(error.found),
            expected=None if error.expected is None else str(error.expected),
            cause=error.cause,
            action=error.action,
        )

    def lines(self) -> list[str]:
        """For people."""
        parts = [("found", self.found), ("expected", self.expected), ("likely cause", self.cause)]
        parts.append(("next action", self.action))
        return [self.headline, *(f"  {name + ':':<14}{value}" for name, value in parts if value is not None)]


def attempt(rule: Callable[[], T], findings: list[Finding]) -> T | None:
    """Ask a rule of the real resume; what it refuses becomes a finding."""
    try:
        return rule()
    except MegaresumeError as error:
        findings.append(Finding.of(error))
        return None
