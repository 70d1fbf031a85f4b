"""Tickets of prompts: for which issue of it a rollout was made, and whether the run still has the weights that made it.

    DIGEST-START.ATTEMPT      0f..9c-5be1a0d2.0, in a run's first start; 0f..9c-77c0f1e45be1a0d212.1 in a later one

DIGEST is 16 hex digits of the prompt's content. START is the name of the start that issued it, drawn anew by each; in a
start that resumed, it is followed by the name of the start that had saved the state, and the version of its weights.
ATTEMPT is how often this start had issued the prompt before.

Weights that a crash threw away and those made after the resume have the same version numbers. So a state names the
starts that led to it, and the last version of each: a rollout of such a start was made by weights of this run up to
that version. For a start that was killed before it had saved: up to the version that it began with.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from megaresume.stream.errors import as_count

#: hex digits of a start's name; and the most starts in a state, the newest.
_DIGITS, _STARTS = 8, 32


class Tickets:
    """Issues this start's tickets, and judges others.

    Args:
        reached: for each start that led to the loaded state, the last version of its weights, oldest first; None: the
            state does not say, and any version up to its own is valid. Empty in a run's first start.
        version: of the weights of that state.
    """

    def __init__(self, reached: Mapping[str, int] | None = None, version: int = 0) -> None:
        self._name, self._version, self._reached = secrets.token_hex(_DIGITS // 2), version, reached
        saved_by = list(reached)[-1] if reached else None
        self._start = self._name + (f"{saved_by}{version}" if saved_by else "")
        self._is_used = False

    def new(self, digest: str, attempt: int) -> str:
        """A ticket for a prompt that is issued."""
        self._is_used = True
        return f"{digest}-{self._start}.{attempt}"

    def parsed(self, ticket: Any) -> tuple[Any, int | None, int]:
        """The digest in a ticket; the attempt, None if another start issued it, or it is unknown; and for another
        start, the newest version of its weights that this run still has.
        """
        if not isinstance(ticket, str):
            return ticket, None, self._version
        digest, _, issue = ticket.partition("-")
        start, _, attempt = issue.partition(".")
        if start == self._start and attempt.isdecimal():
            return digest, int(attempt), self._version
        return digest, None, self._newest_of(start)

    def _newest_of(self, start: str) -> int:
        if not start or self._reached is None:
            return self._version
        name, saved_by, began = start[:_DIGITS], start[_DIGITS : 2 * _DIGITS], start[2 * _DIGITS :]
        if name in self._reached:
            return self._reached[name]
        if saved_by in self._reached and began.isdecimal():
            return min(self._reached[saved_by], int(began))
        return 0  # the weights that every start begins with

    def to_list(self, version: int) -> list[list[Any]]:
        """``reached`` for a state of this start, with weights of this version: a list of [start, version]."""
        found = dict(self._reached or {})
        if self._is_used or version > self._version:
            found[self._name] = version
        return [list(one) for one in found.items()][-_STARTS:]


def reached_of(value: Any) -> dict[str, int] | None:
    """``reached`` from the result of `Tickets.to_list`; None for None. Raises ValueError, TypeError otherwise."""
    return None if value is None else {str(name): as_count(version) for name, version in value}
