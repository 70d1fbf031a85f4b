"""`DataState`: what a checkpoint must carry so that the data continues; one envelope, whatever the data are:

    {"format": "megaresume.data", "version": 1, "kind": "stream", "framework": "megatron-lm 0.16.1",
     "iteration": 10, "samples": 320, "digest": "0123456789abcdef", "content": {...}, "checksum": "<xxh3_128>"}

    kind      content
    stream    `megaresume.stream.state.StreamState`: a stream of megaresume's
    order     the order of Megatron's own datasets, as the guard recorded it
    loader    what is known of the states of a third-party loader; the states are files beside the checkpoint

The envelope is stored twice: within the checkpoint, in a file that the framework writes (that of the weights, or one of
its own: Trainer's trainer_state.json, VeRL's data.pt), and beside it in the step file. The two must be equal. Only a
stream is understood here; the others are opaque to this package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from megaresume.checkpoint.records.sealed import count, text
from megaresume.stream.errors import StateError
from megaresume.stream.state import VERSION as STREAM_VERSION
from megaresume.stream.state import StreamState, check_version, open_envelope
from megaresume.stream.state_text import checksum

FORMAT, VERSION = "megaresume.data", 1

Kind = Literal["stream", "order", "loader"]


class DataState(Protocol):
    """The data of a run at one position. Immutable, the same on every rank; equal states continue in the same way."""

    @property
    def kind(self) -> Kind:
        """Whose order of data it is."""

    @property
    def samples(self) -> int:
        """Samples trained, all ranks together: the number of the next sample."""

    @property
    def digest(self) -> str:
        """16 hex digits: of what was trained, or of what says so."""

    def to_dict(self) -> dict[str, Any]:
        """The content, as plain JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpaqueState:
    """A state that is not a stream's; whoever made it reads its content."""

    kind: Literal["order", "loader"]
    samples: int
    digest: str
    content: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """See `DataState`."""
        return dict(self.content)


def stream_of(state: DataState) -> StreamState:
    """The state as that of a stream.

    Raises:
        StateError: it is of another kind; nothing can be planned again from it.
    """
    if isinstance(state, StreamState):
        return state
    if state.kind == "order":
        raise StateError(
            "the run is under guard: its order is verified where it is rebuilt, at every start",
            found=f"the order of Megatron's own datasets, at sample {state.samples}",
            expected="a megaresume stream, which can be planned again without Megatron",
            action="start the run, which says whether it is as recorded; megaresume inspect DIR shows the record",
        )
    raise StateError(
        "the run is trained on a loader of its own, and megaresume does not know its samples",
        found=f"states of a loader, at sample {state.samples}",
        expected="a megaresume stream, which can be planned again",
        action="megaresume inspect DIR shows what is recorded of the loader",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """A data state as it travels inside a checkpoint."""

    state: DataState
    #: optimizer steps done.
    iteration: int
    #: what trained it, and its version: ``megatron-lm 0.16.1``.
    framework: str = "unknown"

    @property
    def kind(self) -> Kind:
        """Whose order of data it is."""
        return self.state.kind

    @property
    def samples(self) -> int:
        """Samples trained."""
        return self.state.samples

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, with the checksum of all of it; the same on every rank."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.state.kind,
            "framework": self.framework,
            "iteration": self.iteration,
            "samples": self.state.samples,
            "digest": self.state.digest,
            "content": self.state.to_dict(),
        }
        return body | {"checksum": checksum(body)}

    def to_text(self) -> str:
        """`to_dict` as ASCII, in one line: containers that hold text alone (Megatron's ``args``) keep it."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)

    @classmethod
    def read(cls, data: object) -> Envelope:
        """Read what `to_dict` or `to_text` wrote.

        Raises:
            StateError: there is nothing, or it is cut short, damaged, of another format, or lacks a field.
            NewerFormatError: intact, and of a later version.
        """
        return open_envelope(data, _envelope, format_name=FORMAT, version=VERSION, texts=str)


def _envelope(body: Mapping[str, Any]) -> Envelope:
    return Envelope(state=_state(body), iteration=count(body["iteration"]), framework=text(body["framework"]))


def _state(body: Mapping[str, Any]) -> DataState:
    kind, samples, digest, content = body["kind"], count(body["samples"]), body["digest"], body["content"]
    if not isinstance(content, Mapping):
        raise ValueError(f"content is {type(content).__name__}, not an object")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{16}", digest):
        raise ValueError(f"digest {digest!r} is not 16 hex digits")
    if kind not in get_args(Kind):
        raise ValueError(f"kind {kind!r} is not one of {', '.join(get_args(Kind))}")
    if kind != "stream":
        return OpaqueState(kind=kind, samples=samples, digest=digest, content=content)
    check_version(content.get("version"), STREAM_VERSION, "the state of the stream")
    state = StreamState.from_json(content)
    if (state.samples, state.digest) != (samples, digest):
        raise ValueError(f"the stream is at sample {state.samples}, digest {state.digest}, not at {samples}, {digest}")
    return state
