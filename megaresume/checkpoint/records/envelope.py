"""`DataState`: what a checkpoint must contain for the data to continue; in one envelope for any kind of data:

    {"format": "megaresume.data", "version": 1, "kind": "stream", "framework": "megatron-lm 0.16.1",
     "iteration": 10, "samples": 320, "digest": "0123456789abcdef", "content": {...}, "checksum": "<xxh3_128>"}

    kind      content
    stream    `megaresume.stream.state.StreamState`: a stream of megaresume's
    order     the order of Megatron's own datasets, as recorded by the guard
    loader    what is known about the states of a third-party loader; the states are files beside the checkpoint

A checkpoint that lacks weights also has ``frozen``, what is known of them.

The envelope is stored twice: inside the checkpoint, in a file that the framework writes (with the weights, or a
separate one: Trainer's trainer_state.json, VeRL's data.pt), and beside it in the step file. Both must be equal. Only a
stream is interpreted here; the others are opaque to this package.
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
    """The data of a run at one position. Immutable, the same on every rank; equal states continue equally."""

    @property
    def kind(self) -> Kind:
        """Which kind of order it is for."""

    @property
    def samples(self) -> int:
        """Samples trained by all ranks together: the number of the next sample."""

    @property
    def digest(self) -> str:
        """16 hex digits: the digest of what was trained, or of the record of it."""

    def to_dict(self) -> dict[str, Any]:
        """The content, as plain JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpaqueState:
    """A state that is not a stream's; only its creator interprets its content."""

    kind: Literal["order", "loader"]
    samples: int
    digest: str
    content: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """See `DataState`."""
        return dict(self.content)


def stream_of(state: DataState) -> StreamState:
    """The state of a stream.

    Raises:
        StateError: it is of another kind, from which nothing can be planned again.
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
        "the run is trained on its own loader, and megaresume does not know its samples",
        found=f"states of a loader, at sample {state.samples}",
        expected="a megaresume stream, which can be planned again",
        action="megaresume inspect DIR shows what is recorded of the loader",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """A data state as it is stored inside a checkpoint."""

    state: DataState
    #: optimizer steps done.
    iteration: int
    #: the trainer and its version: ``megatron-lm 0.16.1``.
    framework: str = "unknown"
    #: weights that the checkpoint lacks: see `megaresume.hosts.frozen`. None: it lacks none.
    frozen: Mapping[str, Any] | None = None

    @property
    def kind(self) -> Kind:
        """Which kind of order it is for."""
        return self.state.kind

    @property
    def samples(self) -> int:
        """Samples trained."""
        return self.state.samples

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, with a checksum of everything; the same on every rank."""
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
        if self.frozen is not None:
            body["frozen"] = self.frozen
        return body | {"checksum": checksum(body)}

    def to_text(self) -> str:
        """`to_dict` as one line of ASCII, for containers that only store text (Megatron's ``args``)."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)

    @classmethod
    def read(cls, data: object) -> Envelope:
        """Read the result of `to_dict` or `to_text`.

        Raises:
            StateError: it is missing, truncated, damaged, of another format, or lacks a field.
            NewerFormatError: intact, and of a later version.
        """
        return open_envelope(data, _envelope, format_name=FORMAT, version=VERSION, texts=str)


def _envelope(body: Mapping[str, Any]) -> Envelope:
    return Envelope(
        state=_state(body),
        iteration=count(body["iteration"]),
        framework=text(body["framework"]),
        frozen=body.get("frozen"),
    )


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
