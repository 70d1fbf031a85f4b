"""The text of a `StreamState`, made after every step: what has not changed since the last one is not written again.

The same text as of `StreamState.to_dict`, put together from those of the fields. Each field is held twice, in its own
order of keys, which is written, and with sorted keys, which the checksum is of.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import xxhash

from megaresume.stream.eras import Era

#: A field as it is written, and with sorted keys.
Text = tuple[str, str]

as_written = json.JSONEncoder(separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode
with_sorted_keys = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode
_name = lru_cache(maxsize=1 << 13)(as_written)

#: Objects whose texts are kept: configs of stages and fingerprints of a few streams.
MOST_KEPT = 16
#: id -> the object, which is kept so that no other one gets its id, and its text. Such objects are never changed.
_kept: dict[int, tuple[object, Text]] = {}


def checksum(text: str) -> str:
    """xxh3_128 of a text with sorted keys: 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def to_json(state: Any, head: Mapping[str, Any], flat: Mapping[str, Callable[[Any], Any]], most: int) -> str:
    """The text of a state; an empty one if it has more than so many characters.

    Args:
        state: the `StreamState`.
        head: what comes before its fields.
        flat: of "fingerprint", "era" and "config": their plain JSON.
        most: characters.
    """
    values = {name: _both(value) for name, value in head.items()} | _fields(state, flat)
    ordered = _object((name, text[1]) for name, text in sorted(values.items()))
    if len(ordered) > most:
        return ""
    values["checksum"] = _both(checksum(ordered))
    return _object((name, text[0]) for name, text in values.items())


def _fields(state: Any, flat: Mapping[str, Callable[[Any], Any]]) -> dict[str, Text]:
    """In the order in which they are written."""
    stages = [(f"[{s.first},{_name(s.name)},", _constant(s.config, flat["config"])) for s in state.stages]
    sources = {name: _source(cursor, flat["era"]) for name, cursor in state.sources.items()}
    return {
        "config": _constant(state.config, flat["config"]),
        "order": _same(_list(map(_name, state.sources))),
        "fingerprints": _constant(
            state.fingerprints, lambda f: {name: flat["fingerprint"](its) for name, its in f.items()}
        ),
        "samples": _same(str(state.samples)),
        "documents": _same(str(state.documents)),
        "tokens": _same(str(state.tokens)),
        "sources": (
            _object((name, text[0]) for name, text in sources.items()),
            _object((name, text[1]) for name, text in sorted(sources.items())),
        ),
        "bins": _same(_list(f"[{b.opened_at},{_segments(b.segments)}]" for b in state.bins)),
        "pending": _same(_segments(state.pending)),
        "tails": _same(_segments(state.tails)),
        "stages": (_list(f"{a}{text[0]}]" for a, text in stages), _list(f"{a}{text[1]}]" for a, text in stages)),
        "batches": _same(_list(f"[{first},{size}]" for first, size in state.batches)),
        "skips": _both(state.skips.to_plain()),
        "overrides": _both(list(state.overrides)),
        "digest": _same(_name(state.digest)),
        "faults": _both(state.faults.to_plain()),
    }


def _same(text: str) -> Text:
    return text, text


def _both(value: object) -> Text:
    return as_written(value), with_sorted_keys(value)


def _constant(value: object, plain: Callable[[Any], Any]) -> Text:
    found = _kept.get(id(value))
    if found is not None and found[0] is value:
        return found[1]
    text = _both(plain(value))
    while len(_kept) >= MOST_KEPT:
        _kept.pop(next(iter(_kept), 0), None)  # another thread may have taken it
    _kept[id(value)] = value, text
    return text


def _object(items: Iterable[tuple[str, str]]) -> str:
    return "{" + ",".join([f"{_name(name)}:{text}" for name, text in items]) + "}"


def _list(items: Iterable[str]) -> str:
    return "[" + ",".join(items) + "]"


def _segments(segments: Sequence[tuple[int, ...]]) -> str:
    return "[" + ",".join(map(_segment, segments)) + "]"


@lru_cache(maxsize=1 << 13)
def _segment(segment: tuple[int, ...]) -> str:
    """One waits for many steps."""
    source, position, offset, length = segment
    return f"[{source},{position},{offset},{length}]"


def _source(cursor: Any, flat_era: Callable[[Any], Any]) -> Text:
    position, epoch, documents, tokens = cursor.position, cursor.epoch, cursor.documents, cursor.tokens
    skipped, drawn, eras = cursor.skipped, cursor.drawn_in_stage, _eras(cursor.eras, flat_era)
    ended = "true" if cursor.exhausted else "false"
    left_out = f'"left_out_documents":{cursor.left_out_documents},"left_out_tokens":{cursor.left_out_tokens}'
    return (
        f'{{"position":{position},"epoch":{epoch},"documents":{documents},"tokens":{tokens},"skipped":{skipped},'
        f'"drawn_in_stage":{drawn},"exhausted":{ended},{left_out},"eras":{eras}}}',
        f'{{"documents":{documents},"drawn_in_stage":{drawn},"epoch":{epoch},"eras":{eras},"exhausted":{ended},'
        f'{left_out},"position":{position},"skipped":{skipped},"tokens":{tokens}}}',
    )


@lru_cache(maxsize=1 << 13)
def _eras(eras: tuple[Era, ...], flat_era: Callable[[Any], Any]) -> str:
    return as_written([flat_era(era) for era in eras])
