"""`Answer`: the result of a command about a run. Its fields become the JSON, and its ``status`` the exit status.

`Check`: one finding, in an answer that lists several.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self


def live(**options: Any) -> Any:
    """A field of an `Answer` that is used for its text and left out of its JSON, such as an open run."""
    return dataclasses.field(metadata={"live": True}, **options)


def optional() -> Any:
    """A field of an `Answer` that is in its JSON only if it is not None, that is, if it was requested."""
    return dataclasses.field(default=None, metadata={"optional": True})


class told(property):
    """A property of an `Answer`, or of an object in it, that goes into the JSON as fields do."""


class Answer:
    """Base of dataclasses whose fields and `told` properties are the JSON of a command."""

    __slots__ = ()

    @property
    def holds(self) -> bool:
        """Whether the answer is good."""
        return True

    @property
    def status(self) -> int:
        """The exit status of the command: 0 if the answer is good, else 1."""
        return 0 if self.holds else 1

    def give(self, text: Callable[[Self], str], *, as_json: bool) -> int:
        """Print the answer, as JSON or as text. Returns the exit status."""
        print(json.dumps(plain(self)) if as_json else text(self))
        return self.status


def plain(value: Any) -> Any:
    """A value as plain JSON: dataclasses become objects (by their ``to_dict`` if they have one), other types text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if not field.metadata.get("live")]
        names = [f.name for f in fields if not f.metadata.get("optional") or getattr(value, f.name) is not None]
        names += [name for name in dir(type(value)) if isinstance(getattr(type(value), name), told)]
        return {name: plain(getattr(value, name)) for name in names}
    return str(value)


#: ok. note: worth knowing. warning: it may go wrong. problem: it has gone wrong, or will.
Status = Literal["ok", "note", "warning", "problem"]
Area = Literal["environment", "filesystem", "checkpoints", "log"]


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One line of a report: what was checked, what was found, what to do."""

    area: Area
    name: str
    status: Status
    found: str
    #: what the finding means, if that is not obvious.
    cause: str | None = None
    #: the next thing to do.
    action: str | None = None
