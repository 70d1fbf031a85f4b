"""A large state, packed: the same JSON object in columns, compressed, as one text.

The state of a run with a thousand sources, or with thousands of tiny documents in open bins, would be some hundred
kilobytes. It stays one JSON object; what it stands for can still be read beside the text, and
``StreamState.from_json`` reads either form. Columns, because numbers that mean the same compress well together.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

#: What stays readable.
READABLE = ("format", "version", "samples", "documents", "tokens", "digest")
#: Fields of a source that are mostly equal to another one: held as the difference.
NEARLY = {"documents": "position", "drawn_in_stage": "tokens"}
#: What a config says beside what holds in a stage.
NOT_IN_STAGE = ("stages", "skip")


def pack(body: Mapping[str, Any]) -> dict[str, Any]:
    """The plain body of a state, packed."""
    config, order = body["config"], body["order"]
    base = {key: value for key, value in config.items() if key not in NOT_IN_STAGE}
    columns = {
        **body,
        "fingerprints": _columns(body["fingerprints"], order),
        "sources": _differences(_columns(body["sources"], order), -1),
        "config": config | {"sources": _columns(config["sources"], order)},
        # Nearly always the config itself.
        "stages": [[first, name, None if config == base else config] for first, name, config in body["stages"]],
        "bins": [[opened_at, *_segments(segments)] for opened_at, segments in body["bins"]],
        "tails": _segments(body["tails"]) if body["tails"] else [],
    }
    text = json.dumps(columns, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    packed = base64.b85encode(zlib.compress(text.encode(), 6)).decode()
    return {key: body[key] for key in READABLE} | {"packed": packed}


def unpack(body: Mapping[str, Any]) -> dict[str, Any]:
    """What `pack` was given.

    Raises:
        ValueError, KeyError, TypeError: it was not made by `pack`.
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
        "bins": [[opened_at, _unsegmented(segments)] for opened_at, *segments in columns["bins"]],
        "tails": _unsegmented(columns["tails"]) if columns["tails"] else [],
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
    """The fields of `NEARLY` less (``sign`` -1) or plus (1) the one that each is nearly equal to."""
    changed = {
        field: [value + sign * other for value, other in zip(columns[field], columns[like], strict=True)]
        for field, like in NEARLY.items()
    }
    return {**columns, **changed}


def _segments(segments: Sequence[Sequence[int]]) -> list[list[int]]:
    """By column, positions as differences: documents of one source that follow each other are drawn one by one."""
    source, position, offset, length = (list(column) for column in zip(*segments, strict=True))
    return [source, [position[0], *(b - a for a, b in pairwise(position))], offset, length]


def _unsegmented(columns: Sequence[Sequence[int]]) -> list[list[int]]:
    source, position, offset, length = columns
    return [list(segment) for segment in zip(source, accumulate(position), offset, length, strict=True)]
