"""Mutations that keep a file's form, so that what lies behind its checksums is reached, and damage that does not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import xxhash
import yaml

#: What parsers and arithmetic trip over.
_SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 10, 255, 1 << 31, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, 10**30, 0.0, 1.5, -0.0,
    1e308, "", " ", "0", "10", "-1", "1e3", "true", "null", "web", "..", "/", "a/../b", "x" * 300, "é", "\ud800",
    "\x00", "0" * 16, "f" * 16, "global_step10", "iter_0000010", [], {}, [[]], [None], {"": None},
)  # fmt: skip


def mutate_value(value: Any, rng: Random) -> Any:
    """A copy of plain JSON with one to three changes."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _changed(value, rng)
    return value


def _changed(value: Any, rng: Random) -> Any:
    places: list[tuple[Any, Any]] = []
    _collect(value, places)
    if not places:
        return rng.choice(_SCALARS)
    holder, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind <= 2:
        holder[key] = copy.deepcopy(rng.choice(_SCALARS))
    elif kind == 3:
        del holder[key]
    elif kind == 4:
        other_holder, other_key = rng.choice(places)
        holder[key] = copy.deepcopy(other_holder[other_key])
    elif kind == 5 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    elif kind == 5:
        holder[str(rng.choice((*holder, "new", "", key + "x" if isinstance(key, str) else "k")))] = holder[key]
    elif kind == 6 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
        holder[key] += rng.choice((-2, -1, 1, 2, 16, 1 << 32))
    elif kind == 6 and isinstance(holder[key], list):
        rng.shuffle(holder[key])
    else:
        holder[key] = rng.choice(([holder[key]], {"a": holder[key]}, str(holder[key]), float(len(places))))
    return value


def _collect(value: Any, places: list[tuple[Any, Any]]) -> None:
    if isinstance(value, dict):
        for key in value:
            places.append((value, key))
            _collect(value[key], places)
    elif isinstance(value, list):
        for key in range(len(value)):
            places.append((value, key))
            _collect(value[key], places)


def reseal(fields: dict[str, Any]) -> bytes:
    """As `megaresume.files` would, whatever the fields are, NaN included."""
    body = json.dumps({k: v for k, v in fields.items() if k != "checksum"}, separators=(", ", ": "))[:-1].encode()
    return body + f', "checksum": "{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def sealed_file(data: bytes, rng: Random) -> bytes | None:
    """A sealed file with other members and a checksum that fits; None: the data is no JSON object."""
    fields = _object(data)
    changed = mutate_value(fields, rng)
    return reseal(changed) if isinstance(changed, dict) and changed.keys() - {"checksum"} else None


def sealed_lines(data: bytes, rng: Random) -> bytes | None:
    """The same for one line of several; or lines dropped, doubled and swapped."""
    lines = data.split(b"\n")
    k = rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        del lines[k]
    elif kind == 1:
        lines.insert(rng.randrange(len(lines)), lines[k])
    else:
        changed = sealed_file(lines[k], rng)
        if changed is None:
            return None
        lines[k] = changed.rstrip(b"\n")
    return b"\n".join(lines)


def json_file(data: bytes, rng: Random, finish: Callable[[Any], Any] = lambda value: value) -> bytes | None:
    """JSON with other values; ``finish`` may put in a checksum."""
    try:
        return json.dumps(finish(mutate_value(json.loads(data), rng))).encode()
    except (ValueError, RecursionError):
        return None


def yaml_file(data: bytes, rng: Random) -> bytes | None:
    """YAML with other values; None where there are aliases, which may stand for billions."""
    if b"*" in data:
        return None
    try:
        value = yaml.safe_load(data)
        return str(yaml.safe_dump(mutate_value(value, rng), sort_keys=False)).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, AttributeError, KeyError, IndexError):
        return None


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) and fields else None


def damage(originals: Sequence[bytes], script: bytes) -> tuple[int, bytes]:
    """What storage and interrupted copies do to a file, directed by the bytes of a script: flips, cuts, holes, doubled
    and foreign pieces. Checksums are left as they are.

    Returns:
        which original, and what became of it.
    """
    which = script[0] % len(originals) if script else 0
    data = bytearray(originals[which])
    for at in range(1, len(script) - 4, 5):
        kind, place, value = script[at] % 8, int.from_bytes(script[at + 1 : at + 4], "little"), script[at + 4]
        place %= len(data) + 1
        if kind <= 1 and place < len(data):
            data[place] ^= 1 << value % 8
        elif kind == 2:
            del data[place:]
        elif kind == 3:
            del data[place : place + value]
        elif kind == 4:
            data[place : place + value] = bytes(min(value, len(data) - place))
        elif kind == 5:
            data[place:place] = data[max(place - value, 0) : place]
        elif kind == 6:
            other = originals[value % len(originals)]
            data[place:] = other[place:]
        elif kind == 7 and place < len(data):
            data[place] = value
    return which, bytes(data)
