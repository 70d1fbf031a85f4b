"""`Finding`: something that whoever launches the run should know; `Findings`: all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from megaresume.stream.errors import MegaresumeError

__all__ = ["Finding", "Findings"]

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

    def lines(self) -> list[str]:
        """For people."""
        parts = [("found", self.found), ("expected", self.expected), ("likely cause", self.cause)]
        parts.append(("next action", self.action))
        return [self.headline, *(f"  {name + ':':<14}{value}" for name, value in parts if value is not None)]


class Findings(list[Finding]):
    """What the launch would be told."""

    def warn(self, headline: str, **words: str | None) -> None:
        """It would run, and probably not as it is meant; ``words`` are fields of `Finding`."""
        self.append(Finding(kind="warning", headline=headline, **words))

    def note(self, headline: str, **words: str | None) -> None:
        """Just so."""
        self.append(Finding(kind="note", headline=headline, **words))

    def refuse(self, error: MegaresumeError, kind: Kind = "refused") -> None:
        """What an error says."""
        words: dict[str, Any] = {
            name: None if (value := getattr(error, name)) is None else str(value)
            for name in ("found", "expected", "cause", "action")
        }
        self.append(Finding(kind=kind, headline=error.headline, **words))

    def attempt(self, rule: Callable[[], T]) -> T | None:
        """Ask a rule of the real resume; what it refuses becomes a finding."""
        try:
            return rule()
        except MegaresumeError as error:
            self.refuse(error)
            return None

    @property
    def refused(self) -> bool:
        """Whether the launch would stop before its first step."""
        return any(finding.kind == "refused" for finding in self)
