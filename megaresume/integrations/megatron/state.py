"""The state of the data as a string on Megatron's ``args``: ``args.megaresume_state``.

``args`` rides in every checkpoint format. A string, because since core 0.19 it is loaded with ``weights_only=True``,
where a NumPy scalar or a class of ours would make the whole checkpoint unloadable.

    {"format": 1, "project": "megatron-lm", "version": "0.16.1", "iteration": 10, "samples": 320,
     "stream": {...} or "guard": {...}, "checksum": "..."}

It belongs to ``consumed_train_samples`` = ``samples``, whatever a loader has fetched beyond that.

Format history (raise `FORMAT` when a reader of the old one would misunderstand the new):

    1  first version
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from megaresume.stream.errors import StateError
from megaresume.stream.json_text import parse_json
from megaresume.stream.state import checksum

__all__ = ["FORMAT", "KEY", "Kind", "SavedState", "read_state", "state_on", "write_state"]

#: the attribute of Megatron's namespace.
KEY = "megaresume_state"
FORMAT = 1

#: whose order it is: that of our stream, or that of Megatron's own datasets.
Kind = Literal["stream", "guard"]

_INSPECT = "load an older checkpoint with --ckpt-step N: megaresume inspect DIR lists those that are whole"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """What a checkpoint says about its data."""

    #: which Megatron wrote it, and its version, as far as known.
    project: str
    version: str
    #: optimizer steps done.
    iteration: int
    #: ``consumed_train_samples`` at the save.
    samples: int
    kind: Kind
    #: what the order put there: `StreamState.to_dict`, or the guard's record.
    payload: Mapping[str, Any]
    #: the string itself, to be handed on unchanged.
    text: str = field(repr=False, compare=False)

    @property
    def stream(self) -> Mapping[str, Any] | None:
        """The stream state, if it is one."""
        return self.payload if self.kind == "stream" else None

    @property
    def guard(self) -> Mapping[str, Any] | None:
        """The guard's record, if it is one."""
        return self.payload if self.kind == "guard" else None


def write_state(
    *, project: str, version: str | None, iteration: int, samples: int, kind: Kind, payload: Mapping[str, Any]
) -> str:
    """The string for ``args``: plain ASCII JSON, the same on every rank for the same arguments."""
    body = {
        "format": FORMAT,
        "project": project,
        "version": version or "unknown",
        "iteration": int(iteration),
        "samples": int(samples),
        kind: payload,
    }
    return json.dumps(body | {"checksum": checksum(body)}, separators=(",", ":"), allow_nan=False)


def state_on(args: Any) -> str | None:
    """The string on a namespace, a mapping, or nothing; None where there is none."""
    value = args.get(KEY) if isinstance(args, Mapping) else getattr(args, KEY, None)
    return value or None


def read_state(text: object) -> SavedState:
    """Read what `write_state` wrote.

    Raises:
        StateError: no string, truncated, damaged, of a newer format, or lacking a field.
    """
    data = _parse(text)
    version = data.get("format")
    if type(version) is not int or not 1 <= version <= FORMAT:
        newer = type(version) is int and version > FORMAT
        raise StateError(
            "the data state in the checkpoint has a format that this release cannot read",
            found=f"format {version!r}",
            expected=f"a format from 1 to {FORMAT}",
            cause="it was written by a newer megaresume" if newer else "the string was changed by another program",
            action="upgrade: pip install --upgrade megaresume" if newer else _INSPECT,
        )
    body = {key: value for key, value in data.items() if key != "checksum"}
    if data.get("checksum") != checksum(body):
        raise StateError(
            "the data state in the checkpoint is damaged",
            found=f"checksum {data.get('checksum')!r} in the state, {checksum(body)!r} computed",
            expected="the same checksum",
            cause="a bit changed on disk or in transit, or the state was edited by hand",
            action=_INSPECT,
        )
    try:
        return _from_body(body, str(text))
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(
            "the data state in the checkpoint lacks a field or has one of the wrong kind",
            found=f"{type(error).__name__}: {error}",
            expected=f"the fields of format {FORMAT}",
            cause="it was written by a faulty program: its checksum is right",
            action=_INSPECT,
        ) from error


def _parse(text: object) -> dict[str, Any]:
    try:
        data = parse_json(text) if isinstance(text, str) else None
    except ValueError as error:
        raise StateError(
            "the data state in the checkpoint is unreadable",
            found=f"{len(str(text))} characters that are no JSON ({error})",
            expected="one JSON object",
            cause="the string was truncated or damaged",
            action=_INSPECT,
        ) from error
    if not isinstance(data, dict):
        raise StateError(
            "the data state in the checkpoint is unreadable",
            found=f"args.{KEY} is {type(text).__name__} {str(text)[:80]!r}",
            expected="a string with one JSON object",
            cause="another program uses the same attribute",
            action=_INSPECT,
        )
    return data


def _from_body(body: Mapping[str, Any], text: str) -> SavedState:
    kinds: list[Kind] = [kind for kind in get_args(Kind) if kind in body]
    if len(kinds) != 1 or not isinstance(body[kinds[0]], dict):
        raise ValueError(f"one of {', '.join(get_args(Kind))} must be there, and an object")
    for name in ("iteration", "samples"):
        if type(body[name]) is not int or body[name] < 0:
            raise ValueError(f"{name}: {body[name]!r} is not a count")
    for name in ("project", "version"):
        if not isinstance(body[name], str):
            raise TypeError(f"{name}: {body[name]!r} is not a text")
    return SavedState(
        project=body["project"],
        version=body["version"],
        iteration=body["iteration"],
        samples=body["samples"],
        kind=kinds[0],
        payload=body[kinds[0]],
        text=text,
    )
