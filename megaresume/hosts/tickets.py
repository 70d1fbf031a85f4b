"""The tickets of prompts: which issue of it a rollout was asked for by, and whether the run still has the weights that
made it.

    DIGEST-START.ATTEMPT      0f..9c-5be1a0d2.0, in a run's first start; 0f..9c-77c0f1e45be1a0d212.1 in a later one

DIGEST is 16 hex digits of what the prompt holds. START is the name of the start that issued it, drawn anew by each;
after that, in a start that resumed, the name of the start that had saved the state, and the version of its weights.
ATTEMPT says how often this start had issued the prompt before.

A version is a number, which weights that a crash threw away and those made after the resume share. So a state names the
starts that led to it, and the last version of each: a rollout of such a start is made by weights of this run up to that
version. One of a start that was killed before it had saved, up to the version that it began with.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from megaresume.stream.errors import as_count

#: hex digits of a start's name; and how many starts a state names, the newest.
_DIGITS, _STARTS = 8, 32


class Tickets:
    """Those that this start issues, and what it makes of others.

    Args:
        reached: the last version of the weights of each start that led to the state that was loaded, the oldest first;
            None: the state does not say, and any version up to its own counts. Empty in a run's first start.
        version: of the weights of that state.
    """

    def __init__(self, reached: Mapping[str, int] | None = None, version: int = 0) -> None:
        self._name, self._version, self._reached = secrets.token_hex(_DIGITS // 2), version, reached
        saved_by = list(reached)[-1] if reached else None
        self._start = self._name + (f"{saved_by}{version}" if saved_by else "")
        self._is_used = False

    def new(self, digest: str, attempt: int) -> str:
        """For a prompt that is issued."""
        self._is_used = True
        return f"{digest}-{self._start}.{attempt}"

    def parsed(self, ticket: Any) -> tuple[Any, int | None, int]:
        """The digest in a ticket; the attempt, None if another start issued it, or nobody knows; and of such a start
        the newest version of weights that this run still has."""
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
        """``reached`` for a state of this start, with weights of this version: [start, version] of each."""
        found = dict(self._reached or {})
        if self._is_used or version > self._version:
            found[self._name] = version
        return [list(one) for one in found.items()][-_STARTS:]


def reached_of(value: Any) -> dict[str, int] | None:
    """``reached`` of what `Tickets.to_list` gave; None of None. Raises ValueError, TypeError: it is something else."""
    return None if value is None else {str(name): as_count(version) for name, version in value}
