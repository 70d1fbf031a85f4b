"""`StreamState`: a cursor of the stream as plain JSON, the same on every rank; and what a state is carried in.

The state says how far the stream was *trained*, and holds everything needed to resume from there: nothing of ranks,
workers, devices or paths. It is a few kilobytes; ``json.loads(json.dumps(state)) == state``.

It is stored in an envelope: a JSON object with a format, a version and a checksum of everything else. A checkpoint's
data state is one such object, and the stream's state inside it is another. Both are read here, so that a state that is
missing, unreadable, from another program, newer or damaged is refused in the same words.

Raise `VERSION` when the meaning of a field or the order of samples changes, and keep an example of every version in
tests/stream/states/.

Imports neither numpy nor numba, so that ``megaresume inspect`` answers at once.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import ConfigError, NewerFormatError, StateError, as_count, parse_json
from megaresume.stream.left_out import NO_FAULTS, NO_SKIPS, Faults, Skips
from megaresume.stream.skips import reached
from megaresume.stream.state_text import Era, Eras, checksum, flat_era, to_json, unpack

T = TypeVar("T")

_INSPECT = "load an older checkpoint: megaresume inspect DIR lists those that are whole (under Megatron: --ckpt-step N)"


FORMAT = "megaresume.stream-state"
VERSION = 1
_HEAD = {"format": FORMAT, "version": VERSION}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """The identity of a source, independent of its location."""

    documents: int
    tokens: int
    #: xxh3_128 over the lengths of all documents, int64 little-endian, in document order; 32 hex digits.
    lengths: str
    #: fingerprint of the tokenizer that made the corpus, if known; for image-text data, of the whole encoder.
    tokenizer: str | None = None
    #: xxh3_64 of tokens at fixed places (`megaresume.data.source`), or of the hashes of all records of shards;
    #: None if unknown, for a source that only has lengths.
    contents: str | None = None
    #: xxh3_64 of the spans of trained tokens (`megaresume.data.spans`); None, and omitted from a state, if every token
    #: is trained, or the source decides it with its documents.
    trained: str | None = None


class SourceCursor(NamedTuple):
    """The position in one source. A tuple, like `Segment` and `Bin`, because a state is taken after every step."""

    #: pieces drawn or passed over since the start of the run; the next draw looks from here.
    position: int
    #: the epoch that the position is in, counted from 0.
    epoch: int
    #: documents whose first piece was drawn, open bins included.
    documents: int
    #: tokens drawn, open bins included.
    tokens: int
    #: pieces passed over: empty documents, and those skipped by number.
    skipped: int
    #: tokens (or documents, by blend.unit) drawn since the deficits last started at zero.
    drawn_in_stage: int
    #: reached max_epochs and was dropped.
    exhausted: bool
    #: the part of those documents and tokens that is in samples left out, or was removed from open bins.
    left_out_documents: int = 0
    left_out_tokens: int = 0
    #: the pieces of its epochs; none if it was never to be drawn. See `megaresume.stream.order`.
    eras: tuple[Era, ...] = ()

    @property
    def left(self) -> int:
        """Pieces of the epoch not drawn yet; 0 if unknown."""
        return Eras(self.eras).end_of_epoch(self.position) - self.position if self.eras else 0

    @property
    def size(self) -> int:
        """Pieces of the epoch; 0 if unknown."""
        return self.left + self.position - Eras(self.eras).start_of(self.epoch) if self.eras else 0

    @property
    def epochs(self) -> float:
        """Epochs drawn, with a fraction."""
        return self.epoch + (1 - self.left / self.size if self.eras else 0.0)


class Segment(NamedTuple):
    """A run of tokens of one document. A state has several hundred."""

    #: the source, as an index into the sources of the config.
    source: int
    #: position in the source: epoch, document and piece follow from it.
    position: int
    #: tokens of the document before the segment.
    offset: int
    #: tokens of the segment.
    length: int


class Bin(NamedTuple):
    """A sample that is being filled."""

    #: samples closed when the bin was opened, including those left out.
    opened_at: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRecord:
    """A stage that has begun."""

    #: the first sample of the stage.
    first: int
    name: str
    #: the config that holds in the stage: `StreamConfig.to_dict`, without stages.
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamState:
    """A cursor of the stream. All counts are since the start of the run."""

    #: the kind of state, among those that a checkpoint may hold.
    kind: ClassVar[Literal["stream"]] = "stream"

    #: the normalised data config, including declared changes (`StreamConfig.to_dict`).
    config: Mapping[str, Any]
    #: the fingerprints of the sources, by name.
    fingerprints: Mapping[str, Fingerprint]
    #: the number of samples trained, which is the number of the next one.
    samples: int
    #: documents whose first segment is in those samples.
    documents: int
    #: tokens of documents in those samples (padding is not counted).
    tokens: int
    #: the cursors of the sources, by name.
    sources: Mapping[str, SourceCursor]
    #: open bins, in the order in which they were opened.
    bins: Sequence[Bin]
    #: segments to be placed: the rest of a document being cut, or carried over from the previous stage.
    pending: Sequence[Segment]
    #: the tails that packing ``split`` cut off and keeps for a later sample, the oldest first.
    tails: Sequence[Segment] = ()
    #: the stages that have begun.
    stages: tuple[StageRecord, ...]
    #: (first sample, global batch size in samples), ascending: maps steps to samples.
    batches: tuple[tuple[int, int], ...]
    #: differences that a user accepted, in words, kept forever.
    overrides: tuple[str, ...]
    #: rolling hash of the identities of all samples up to here; 16 hex digits.
    digest: str
    #: documents of those samples that a fault policy was applied to. Not part of the order, so never compared.
    faults: Faults = NO_FAULTS
    #: what is left out of the stream.
    skips: Skips = NO_SKIPS

    @property
    def reached(self) -> int:
        """The position of the stream, counting the samples left out."""
        return reached(self.skips.ranges, self.samples)

    @property
    def config_now(self) -> StreamConfig:
        """The config of the stage that it is in."""
        return StreamConfig.recorded(self.stages[-1].config)

    def places(self, first: int, stop: int) -> int:
        """Token capacity of samples ``first .. stop``, by the stages that have begun."""
        ends = [*(stage.first for stage in self.stages[1:]), max(stop, self.stages[-1].first)]
        return sum(
            max(min(end, stop) - max(stage.first, first), 0) * int(stage.config["seq_length"])
            for stage, end in zip(self.stages, ends, strict=True)
        )

    @property
    def waiting(self) -> list[Segment]:
        """The segments that were drawn and are in no sample yet."""
        return [*(s for b in self.bins for s in b.segments), *self.pending, *self.tails]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, with format, version and checksum; a large state is packed (`megaresume.stream.state_text`)."""
        plain: dict[str, Any] = json.loads(self.to_json())
        return plain

    def to_json(self) -> str:
        """`to_dict` as compact text."""
        return to_json(self, _HEAD)

    def _repr_html_(self) -> str:
        """The state as a picture, for Jupyter."""
        from megaresume.stream.pictures import picture_of_state

        return picture_of_state(self)

    def replace(self, **changes: Any) -> StreamState:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_json(cls, state: str | bytes | Mapping[str, Any] | None) -> StreamState:
        """Read what `to_json` or `to_dict` wrote.

        Raises:
            StateError: missing, truncated or not JSON, of another format, or damaged.
            NewerFormatError: of a newer version.
        """
        return open_envelope(state, _from_members, format_name=FORMAT, version=VERSION, texts=(str, bytes))


def _from_members(body: dict[str, Any]) -> StreamState:
    return _from_plain(unpack(body) if "packed" in body else body)


#: Fields of an era of the first stage, which leaves its number out.
_SETTLED_AT_ONCE = len(Era._fields) - 1


def _segment(short: object) -> Segment:
    source, position, offset, length = (as_count(n) for n in _list(short))
    return Segment(source=source, position=position, offset=offset, length=length)


def _cursor(fields: object) -> SourceCursor:
    if not isinstance(fields, Mapping):
        raise ValueError(f"{fields!r} is not the state of a source")
    exhausted = fields["exhausted"]
    if not isinstance(exhausted, bool):
        raise ValueError(f"exhausted: {exhausted!r} is not true or false")
    if set(fields) != set(SourceCursor._fields):
        raise KeyError(f"the fields of a source are {', '.join(fields)}")
    eras = tuple(_era(e) for e in _list(fields["eras"]))
    counts = {k: as_count(v) for k, v in fields.items() if k not in ("exhausted", "eras")}
    return SourceCursor(exhausted=exhausted, eras=eras, **counts)


def _era(short: object) -> Era:
    fields = [as_count(n) for n in _list(short)]
    names = Era._fields[:_SETTLED_AT_ONCE] if len(fields) == _SETTLED_AT_ONCE else Era._fields
    if len(fields) != len(names):
        raise ValueError(f"{short!r} is not an era of a source")
    era = Era(**dict(zip(names, fields, strict=True)))
    if not era.pieces or flat_era(era) != fields:
        raise ValueError(f"{short!r} is not an era of a source")
    return era


def _fingerprint(fields: object) -> Fingerprint:
    if not isinstance(fields, Mapping):
        raise ValueError(f"{fields!r} is not the fingerprint of a source")
    if {"trained", *fields} != set(Fingerprint.__slots__):
        raise KeyError(f"the fields of a fingerprint are {', '.join(fields)}")
    return Fingerprint(
        documents=as_count(fields["documents"]),
        tokens=as_count(fields["tokens"]),
        lengths=_text(fields["lengths"]),
        tokenizer=None if fields["tokenizer"] is None else _text(fields["tokenizer"]),
        contents=None if fields["contents"] is None else _text(fields["contents"]),
        trained=_text(fields["trained"]) if "trained" in fields else None,
    )


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"{value!r} is not a text")


def _list(value: object) -> list[Any]:
    if isinstance(value, list):
        return value
    raise ValueError(f"{value!r} is not a list")


def _digest(value: object) -> str:
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{16}", value):
        return value
    raise ValueError(f"digest {value!r} is not 16 hex digits")


def _ordered(by_name: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    if sorted(by_name) != sorted(order):
        raise ValueError(f"sources {sorted(by_name)} where {sorted(order)} should be")
    return {name: by_name[name] for name in order}


def _from_plain(body: Mapping[str, Any]) -> StreamState:
    order = [_text(name) for name in _list(body["order"])]
    return StreamState(
        config={**body["config"], "sources": _ordered(body["config"]["sources"], order)},
        fingerprints={name: _fingerprint(f) for name, f in _ordered(body["fingerprints"], order).items()},
        samples=as_count(body["samples"]),
        documents=as_count(body["documents"]),
        tokens=as_count(body["tokens"]),
        sources={name: _cursor(s) for name, s in _ordered(body["sources"], order).items()},
        bins=tuple(
            Bin(opened_at=as_count(opened_at), segments=tuple(_segment(s) for s in _list(segments)))
            for opened_at, segments in map(_list, _list(body["bins"]))
        ),
        pending=tuple(_segment(s) for s in _list(body["pending"])),
        tails=tuple(_segment(s) for s in _list(body["tails"])),
        stages=tuple(
            StageRecord(
                first=as_count(first),
                name=_text(name),
                config={**config, "sources": _ordered(config["sources"], order)},
            )
            for first, name, config in map(_list, _list(body["stages"]))
        ),
        batches=tuple((as_count(first), as_count(size)) for first, size in map(_list, _list(body["batches"]))),
        skips=Skips.from_plain(body["skips"]),
        overrides=tuple(_text(o) for o in _list(body["overrides"])),
        digest=_digest(body["digest"]),
        faults=Faults.from_plain(body["faults"]),
    )


def is_version(found: object, newest: int, what: str, path: Path | None = None) -> bool:
    """Whether this is a known version.

    Args:
        found: the member ``version`` of an intact object.
        newest: the newest known version.
        what, path: for the error.

    Raises:
        NewerFormatError: it is a later one.
    """
    if type(found) is int and found > newest:
        raise NewerFormatError(
            f"{what} was written by a newer megaresume",
            found=f"version {found}" if path is None else f"{path}: version {found}",
            expected=f"version {newest} or older",
            action="upgrade megaresume on this machine to the version that wrote it: pip install --upgrade megaresume",
        )
    return type(found) is int and found >= 1


def check_version(found: object, newest: int, what: str) -> None:
    """Refuse an unknown version.

    Raises:
        NewerFormatError: it is a later one.
        StateError: not a version.
    """
    if not is_version(found, newest, what):
        raise StateError(
            f"{what} has a version that this release cannot read",
            found=f"version {found!r}",
            expected=f"a version from 1 to {newest}",
            cause="it was changed by another program",
            action=_INSPECT,
        )


def open_envelope(
    data: object, make: Callable[[dict[str, Any]], T], *, format_name: str, version: int, texts: type | tuple[type, ...]
) -> T:
    """Check a data state and build it from its members with ``make``.

    Args:
        data: a mapping, or the JSON of one.
        make: takes the members, without the checksum.
        format_name: the ``format`` that it must have.
        version: the newest known version.
        texts: the types of a text.

    Raises:
        StateError: it is missing, truncated, damaged, of another format, or ``make`` finds a member missing or of the
            wrong kind.
        NewerFormatError: of a later version.
    """
    fields = _parse(data, texts)
    if fields.get("format") != format_name:
        raise StateError(
            "this is not a data state of megaresume",
            found=f"format {fields.get('format')!r}",
            expected=f"format {format_name!r}",
            cause="another program's state, or another file",
            action="check which checkpoint is being loaded: megaresume inspect DIR",
        )
    body = {key: value for key, value in fields.items() if key != "checksum"}
    check_version(fields.get("version"), version, "the data state")
    if fields.get("checksum") != checksum(body):
        raise StateError(
            "the data state is damaged",
            found=f"checksum {fields.get('checksum')!r} in the state, {checksum(body)!r} computed",
            expected="the same checksum",
            cause="a bit changed on disk or in transit, or the state was edited by hand",
            action=_INSPECT,
        )
    try:
        return make(body)
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        expected = f"the fields of version {version}"
        raise StateError.misshapen("the data state", error, expected, action=_INSPECT) from error


def _parse(data: object, texts: type | tuple[type, ...]) -> Mapping[str, Any]:
    if data is None or (isinstance(data, str | bytes) and isinstance(data, texts) and not data.strip()):
        raise StateError(
            "there is no data state",
            found="nothing",
            expected="the state that megaresume saved with the checkpoint",
            cause="the checkpoint was written without megaresume, or the file is empty",
            action="megaresume inspect DIR shows which checkpoints have a data state",
        )
    found, why = f"{type(data).__name__} {str(data)[:80]!r}", "another program uses the same name"
    if isinstance(data, str | bytes) and isinstance(data, texts):
        size = len(data)
        try:
            data = parse_json(data)
        except ValueError as error:
            found, why = f"{size} bytes that are not JSON ({error})", "the text was cut short or damaged"
    if isinstance(data, Mapping):
        return data
    raise StateError(
        "the data state is unreadable", found=found, expected="one JSON object", cause=why, action=_INSPECT
    )
