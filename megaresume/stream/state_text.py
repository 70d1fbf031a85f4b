"""The text of a `StreamState`, made after every step; unchanged parts are reused.

It is joined from the texts of the fields. Each field has two: in its own order of keys, to be written, and with sorted
keys, for the checksum. One of the fields is `Eras`: where the epochs of a source begin and end

A large state is packed: the same JSON object in columns, compressed, as one text. Unpacked, a state of a thousand
sources, or of thousands of tiny documents in open bins, would be several hundred kilobytes. It is still one JSON object
with its most useful fields readable beside the text, and ``StreamState.from_json`` reads either form. Columns compress
well, as they put similar numbers together.

Imports neither numpy nor numba, as `megaresume.stream.state`.
"""

from __future__ import annotations

import base64
import json
import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar, overload

import xxhash

T = TypeVar("T")


class Era(NamedTuple):
    """A run of positions of a source with one set of pieces."""

    #: the first position of the era.
    first: int
    #: the epoch of that position.
    epoch: int
    #: documents of the source.
    documents: int
    #: tokens of the longest piece; 0: documents are whole.
    piece: int
    #: pieces of an epoch; in the rest of an epoch, its positions.
    pieces: int
    #: 0; or, in the rest of an epoch that new documents joined, its number of positions without them.
    rest: int = 0
    #: number of the stage that made it: planning an earlier stage again must not look ahead into it.
    stage: int = 0


class Eras:
    """The eras of one source.

    Args:
        eras: in order; none while nothing can be drawn from the source.
    """

    def __init__(self, eras: Sequence[Era]) -> None:
        self.eras = tuple(eras)
        self._firsts = [era.first for era in self.eras]

    @staticmethod
    def epoch_bounds(era: Era, position: int) -> tuple[int, int]:
        """The first position and the end of the epoch at a position of an era, or of the rest of that epoch."""
        if era.rest:
            end = era.first + era.pieces
            return (era.first, end) if position < end else (end, end)
        begin = era.first + (position - era.first) // era.pieces * era.pieces
        return begin, begin + era.pieces

    def _number(self, position: int) -> int:
        return bisect_right(self._firsts, position) - 1

    def epoch_of(self, position: int) -> int:
        """The epoch that a position is in."""
        if not self.eras:
            return 0
        era = self.eras[self._number(position)]
        return era.epoch if era.rest else era.epoch + (position - era.first) // era.pieces

    def end_of_epoch(self, position: int) -> int:
        """The position after the last one of the epoch that a position is in."""
        k = self._number(position)
        end = self.epoch_bounds(self.eras[k], position)[1]
        # An era that begins before that is the rest of the same epoch.
        while k + 1 < len(self.eras) and self.eras[k + 1].first < end:
            k += 1
            end = self.eras[k].first + self.eras[k].pieces
        return end

    def left(self, position: int) -> int:
        """Positions from this one on that are in the same epoch and era."""
        k = self._number(position)
        end = self.epoch_bounds(self.eras[k], position)[1]
        return (min(end, self.eras[k + 1].first) if k + 1 < len(self.eras) else end) - position

    def start_of(self, epoch: int) -> int:
        """The first position of an epoch."""
        era = next(e for e in reversed(self.eras) if e.epoch <= epoch and not e.rest)
        return era.first + (epoch - era.epoch) * era.pieces

    def piece_length(self, position: int) -> int:
        """Tokens of the longest piece at a position; 0: documents are whole."""
        return self.eras[self._number(position)].piece


class LazyTuple(Sequence[T]):
    """A tuple that is parsed from its text when it is first read; most states are only written.

    Args:
        text: compact JSON of a list.
        make: takes an item of it.
    """

    def __init__(self, text: str, make: Callable[[Any], T]) -> None:
        self.text, self._make = text, make

    @cached_property
    def _items(self) -> tuple[T, ...]:
        return tuple(map(self._make, json.loads(self.text)))

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[T, ...]: ...
    def __getitem__(self, at: int | slice) -> T | tuple[T, ...]:
        return self._items[at]

    def __eq__(self, other: object) -> bool:
        return self._items == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._items)

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[T, ...]:
        """The tuple itself, which `dataclasses.asdict` then passes to a JSON writer."""
        return self._items

    def __repr__(self) -> str:
        return repr(self._items)


#: A field's text as written, and with sorted keys.
Text = tuple[str, str]

_as_written = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode
_with_sorted_keys = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode
_name = lru_cache(maxsize=1 << 13)(_as_written)

#: A state is packed from this many characters on.
LARGE = 1 << 14
#: Results that `_once` caches: configs, stages and fingerprints of a few streams.
MOST_KEPT = 64
#: (function, id of each object) -> the objects, kept so that their ids are not reused, and the result.
_kept: dict[tuple[object, ...], tuple[tuple[object, ...], Any]] = {}

#: The fields of a state in the order in which they are written, after the head.
FIELDS = (
    *("config", "order", "fingerprints", "samples", "documents", "tokens", "sources", "bins", "pending", "tails"),
    *("stages", "batches", "skips", "overrides", "digest", "faults"),
)
#: The fields for which a packed state has a text of its own.
COLUMNS = {"config", "fingerprints", "sources", "bins", "tails", "stages"}
#: The fields of a packed state that stay readable, after the head.
READABLE = ("samples", "documents", "tokens", "digest")
#: Fields of a source that nearly equal another one, and are stored as the difference.
NEARLY = {"documents": "position", "drawn_in_stage": "tokens"}
#: The fields of a config that do not describe a stage.
NOT_IN_STAGE = ("stages", "skip")


def checksum(body: Mapping[str, Any]) -> str:
    """The checksum of plain JSON: xxh3_128 of its compact text, 32 hex digits."""
    # Sorted keys, because a container that reorders keys must not look like damage.
    return _checksum(_with_sorted_keys(body))


def _checksum(ordered: str) -> str:
    return xxhash.xxh3_128_hexdigest(ordered.encode())


def to_json(state: Any, head: Mapping[str, Any]) -> str:
    """The text of a `StreamState`, with ``head`` before its fields. ``head`` is cached: pass the same object."""
    order = _same_object(tuple(state.sources))
    short = {name: _once(_both, value) for name, value in head.items()} | _short_fields(state, order)
    config, fingerprints = _once(_both, state.config), _once(_fingerprints, state.fingerprints)
    if len(config[0]) + len(fingerprints[0]) <= LARGE:
        values = short | {"config": config, "fingerprints": fingerprints} | _long_fields(state)
        ordered = _object((name, text[1]) for name, text in sorted(values.items()))
        if len(ordered) <= LARGE:
            return _sealed({name: values[name][0] for name in (*head, *FIELDS)}, ordered)
    body = {name: short[name][0] for name in (*head, *READABLE)} | {"packed": _packed(state, head, order, short)}
    return _sealed(body, _object(sorted(body.items())))


def _sealed(body: Mapping[str, str], ordered: str) -> str:
    """The text of a body with its checksum, which is computed with ordered keys."""
    return _object([*body.items(), ("checksum", _name(_checksum(ordered)))])


def _short_fields(state: Any, order: tuple[str, ...]) -> dict[str, Text]:
    """The fields that a packed state has too."""
    return {
        # Segments and ties depend on the order of the sources, which a container that sorts keys would lose.
        "order": _once(_both, order),
        "samples": _same(str(state.samples)),
        "documents": _same(str(state.documents)),
        "tokens": _same(str(state.tokens)),
        "pending": _same(_tuples(state.pending)),
        "batches": _same(_list(f"[{first},{size}]" for first, size in state.batches)),
        "skips": _once(_plain, state.skips),
        "overrides": _same(_name(tuple(state.overrides))),
        "digest": _same(_name(state.digest)),
        "faults": _faults(state.faults),
    }


def _long_fields(state: Any) -> dict[str, Text]:
    """The fields of `COLUMNS` that change."""
    sources = {name: _source(cursor) for name, cursor in state.sources.items()}
    return {
        "sources": (
            _object((name, text[0]) for name, text in sources.items()),
            _object((name, text[1]) for name, text in sorted(sources.items())),
        ),
        "bins": _same(_tuples(state.bins)),
        "tails": _same(_tuples(state.tails)),
        "stages": _once(_stages, state.stages),
    }


def _stages(records: Iterable[Any]) -> Text:
    return _both([[record.first, record.name, record.config] for record in records])


def _same(text: str) -> Text:
    return text, text


def _both(value: object) -> Text:
    return _as_written(value), _with_sorted_keys(value)


def _plain(value: Any) -> Text:
    return _both(value.to_plain())


#: The text of faults, cached by value, as each state may have an equal copy.
_faults = lru_cache(maxsize=16)(_plain)


def _once(make: Callable[..., T], *objects: Any) -> T:
    """The result of ``make`` for immutable objects, cached for later states that have the same ones."""
    key = (make, *map(id, objects))
    found = _kept.get(key)
    if found is None:
        found = objects, make(*objects)
        while len(_kept) >= MOST_KEPT:
            _kept.pop(next(iter(list(_kept)), ()), None)  # other threads add and take at the same time
        _kept[key] = found
    result: T = found[1]
    return result


@lru_cache(maxsize=MOST_KEPT)
def _same_object(names: tuple[str, ...]) -> tuple[str, ...]:
    """One object for equal names, as `_once` needs."""
    return names


def _object(items: Iterable[tuple[str, str]]) -> str:
    return "{" + ",".join([f"{_name(name)}:{text}" for name, text in items]) + "}"


def _list(items: Iterable[str]) -> str:
    return "[" + ",".join(items) + "]"


def _tuples(tuples: Sequence[Any]) -> str:
    """The text of segments or bins."""
    return tuples.text if isinstance(tuples, LazyTuple) else _as_written(tuples)


def _plain_tuples(tuples: Sequence[Any]) -> Sequence[Any]:
    return json.loads(tuples.text) if isinstance(tuples, LazyTuple) else tuples


def _source(cursor: Any) -> Text:
    position, epoch, documents, tokens, skipped, drawn, exhausted, left_out_documents, left_out_tokens, eras = cursor
    ended, eras = "true" if exhausted else "false", _eras(eras)
    left_out = f'"left_out_documents":{left_out_documents},"left_out_tokens":{left_out_tokens}'
    return (
        f'{{"position":{position},"epoch":{epoch},"documents":{documents},"tokens":{tokens},"skipped":{skipped},'
        f'"drawn_in_stage":{drawn},"exhausted":{ended},{left_out},"eras":{eras}}}',
        f'{{"documents":{documents},"drawn_in_stage":{drawn},"epoch":{epoch},"eras":{eras},"exhausted":{ended},'
        f'{left_out},"position":{position},"skipped":{skipped},"tokens":{tokens}}}',
    )


@lru_cache(maxsize=1 << 14)
def _eras(eras: tuple[Era, ...]) -> str:
    return _as_written([flat_era(era) for era in eras])


def flat_era(era: Era) -> list[int]:
    """The fields of an era; the number of the stage is left out for the first one."""
    return list(era if era.stage else era[:-1])


def _plain_fingerprints(by_name: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {k: v for k in its.__slots__ if (v := getattr(its, k)) is not None or k != "trained"}
        for name, its in by_name.items()
    }


def _fingerprints(by_name: Mapping[str, Any]) -> Text:
    return _both(_plain_fingerprints(by_name))


class _Beginning(NamedTuple):
    """The unchanging beginning of the packed text, deflated."""

    #: holds pending output; copied before use.
    deflate: Any
    #: its output in base 85, as far as it is in whole groups of four bytes; and the bytes after that.
    encoded: str
    rest: bytes


def _beginning(head: Mapping[str, Any], config: Mapping[str, Any], order: Sequence[str], prints: Any) -> _Beginning:
    plain = json.loads(_as_written(config))
    columns = plain | {"sources": _columns(plain["sources"], order)}
    fields = {**head, "config": columns, "order": order, "fingerprints": _columns(_plain_fingerprints(prints), order)}
    deflate = zlib.compressobj(6)
    done = deflate.compress(_as_written(fields)[:-1].encode())
    whole = len(done) // 4 * 4
    return _Beginning(deflate, base64.b85encode(done[:whole]).decode(), done[whole:])


def _packed(state: Any, head: Mapping[str, Any], order: tuple[str, ...], short: Mapping[str, Text]) -> str:
    """A text of `FIELDS` in columns, compressed; `unpack` reads it."""
    beginning = _once(_beginning, head, state.config, order, state.fingerprints)
    long = {
        "sources": _sources_in_columns(state.sources.values()),
        "bins": _as_written([[opened_at, *_by_column(segments)] for opened_at, segments in _plain_tuples(state.bins)]),
        "tails": _as_written(_by_column(_plain_tuples(state.tails))),
        "stages": _once(_packed_stages, state.stages, state.config),
    }
    fields = FIELDS[FIELDS.index("fingerprints") + 1 :]
    text = _object((name, long[name] if name in COLUMNS else short[name][0]) for name in fields)
    deflate = beginning.deflate.copy()
    done = beginning.rest + deflate.compress(f",{text[1:]}".encode()) + deflate.flush()
    return f'"{beginning.encoded}{base64.b85encode(done).decode()}"'


def _packed_stages(records: Iterable[Any], config: Mapping[str, Any]) -> str:
    """The stages, without their configs where these equal the state's own, as they nearly always do."""
    base, *configs = json.loads(_as_written([config, *(record.config for record in records)]))
    base = {key: value for key, value in base.items() if key not in NOT_IN_STAGE}
    return _as_written(
        [[s.first, s.name, None if own == base else own] for s, own in zip(records, configs, strict=True)]
    )


def _sources_in_columns(cursors: Collection[Any]) -> str:
    names = next(iter(cursors))._fields
    columns = dict(zip(names, zip(*cursors, strict=True), strict=True))
    eras = columns.pop("eras")  # the last one
    numbers = _object((name, _as_written(column)) for name, column in _differences(columns, -1).items())
    return f'{numbers[:-1]},"eras":{_list(map(_eras, eras))}}}'


def unpack(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a packed state, unpacked.

    Raises:
        ValueError, KeyError, TypeError: it is malformed.
    """
    try:
        columns = json.loads(zlib.decompress(base64.b85decode(body["packed"])))
    except zlib.error as error:
        raise ValueError(f"packed: {error}") from error
    order = columns["order"]
    config = columns["config"] | {"sources": _rows(columns["config"]["sources"], order)}
    base = {key: value for key, value in config.items() if key not in NOT_IN_STAGE}
    return {
        **columns,
        "fingerprints": _rows(columns["fingerprints"], order),
        "sources": _rows(_differences(columns["sources"], 1), order),
        "config": config,
        "stages": [[first, name, base if config is None else config] for first, name, config in columns["stages"]],
        "bins": [[opened_at, _by_segment(segments)] for opened_at, *segments in columns["bins"]],
        "tails": _by_segment(columns["tails"]) if columns["tails"] else [],
    }


def _columns(by_name: Mapping[str, Mapping[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """Field by field: a list of all values, hashes as one text; if some sources lack it, a map from number to value."""
    fields = dict.fromkeys(field for name in order for field in by_name[name])
    columns: dict[str, Any] = {}
    for field in fields:
        values = {str(k): by_name[name][field] for k, name in enumerate(order) if field in by_name[name]}
        column = list(values.values())
        if len(column) < len(order):
            columns[field] = values
        else:
            hashes = all(isinstance(v, str) and v for v in column) and len({len(v) for v in column}) == 1
            columns[field] = "".join(column) if hashes else column
    return columns


def _rows(columns: Mapping[str, Any], order: Sequence[str]) -> dict[str, dict[str, Any]]:
    rows: list[dict[str, Any]] = [{} for _ in order]
    for field, values in columns.items():
        if isinstance(values, str):
            size = len(values) // len(order)
            values = [values[k : k + size] for k in range(0, len(values), size)]
        for k, value in enumerate(values) if isinstance(values, list) else values.items():
            rows[int(k)][field] = value
    return dict(zip(order, rows, strict=True))


def _differences(columns: Mapping[str, Any], sign: int) -> dict[str, Any]:
    """The fields of `NEARLY` minus (``sign`` -1) or plus (1) those that each nearly equals."""
    changed = {
        field: [value + sign * other for value, other in zip(columns[field], columns[like], strict=True)]
        for field, like in NEARLY.items()
    }
    return {**columns, **changed}


def _by_column(segments: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rows as columns, with positions as differences, as consecutive documents of a source have consecutive ones."""
    if not segments:
        return []
    source, position, offset, length = (list(column) for column in zip(*segments, strict=True))
    return [source, [position[0], *(b - a for a, b in pairwise(position))], offset, length]


def _by_segment(columns: Sequence[Sequence[int]]) -> list[list[int]]:
    source, position, offset, length = columns
    return [list(segment) for segment in zip(source, accumulate(position), offset, length, strict=True)]
