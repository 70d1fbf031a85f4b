"""Sealed JSON, the format of all our records: an object whose last member is the checksum of all bytes before it.

    {"format": "megaresume.step", "version": 1, ..., "checksum": "<xxh3_128 of all before this member, 32 hex>"}

The seal covers bytes, not parsed values: no flipped bit passes, and checking ten thousand ledger lines needs no second
serialisation. **The seal itself is the same in every format version**, so that a damaged file is never mistaken for one
of a newer version: a newer version stops a resume, damage falls back to an older checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from megaresume.files import read_file
from megaresume.stream.errors import MegaresumeError, parse_json, visible
from megaresume.stream.state import is_version

T = TypeVar("T")

#: The tail is matched from its start, so that the search is linear for any content.
_SEAL = re.compile(rb',\s*"checksum":\s*"([0-9a-f]{32})"\s*\}\s*')

#: The end of a sealed object, even if its checksum is damaged.
_END = re.compile(rb'"\s*\}\s*\Z')

_SEAL_START = b'"checksum"'


class SealError(ValueError):
    """Raised for bytes that are not an intact sealed object; the message is the rest of a sentence about the file."""

    def __init__(self, message: str, *, cut: bool = False) -> None:
        super().__init__(message)
        #: the end is missing, as after a killed write.
        self.cut = cut


def _dumps(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(", ", ": "))


def _spread(value: object, depth: int, indent: str = "") -> str:
    """JSON with one member per line down to ``depth``, compact below: readable, but without a line per integer."""
    if depth == 0 or not isinstance(value, (dict, list)) or not value:
        return _dumps(value)
    inner = indent + "  "
    if isinstance(value, dict):
        parts = [f"{_dumps(str(key))}: {_spread(item, depth - 1, inner)}" for key, item in value.items()]
        opening, closing = "{", "}"
    else:
        parts = [_spread(item, depth - 1, inner) for item in value]
        opening, closing = "[", "]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{closing}"


def seal(fields: Mapping[str, Any], *, depth: int = 0) -> bytes:
    """Serialise an object and append its checksum.

    Args:
        fields: plain JSON values, not empty, without a member ``checksum``.
        depth: levels that are written with one member per line; 0 gives a single line. Ends with a newline.
    """
    if not fields or "checksum" in fields:
        raise ValueError("sealed fields must not be empty or have a member named checksum")
    text = _spread(dict(fields), depth)
    body = text[: -(2 if depth else 1)].encode("ascii")
    opening, closing = (b",\n  ", b"\n}\n") if depth else (b", ", b"}\n")
    return body + opening + f'"checksum": "{xxhash.xxh3_128_hexdigest(body)}"'.encode("ascii") + closing


def unseal(data: bytes) -> dict[str, Any]:
    """Check and parse a sealed object.

    Returns:
        its members, including ``checksum``.

    Raises:
        SealError: empty, truncated, or damaged.
    """
    if not data.strip():
        raise SealError("is empty" if not data else "holds nothing but white space")
    start = data.rfind(_SEAL_START)
    comma = data.rfind(b",", 0, start) if start >= 0 else -1
    match = _SEAL.fullmatch(data, comma) if comma >= 0 else None
    if match is None:
        if _END.search(data[-16:]):
            raise SealError("has no checksum at its end")
        raise SealError(f"is cut short after {len(data)} bytes", cut=True)
    actual = xxhash.xxh3_128_hexdigest(data[:comma])
    recorded = match[1].decode("ascii")
    if actual != recorded:
        raise SealError(f"is damaged: its content has checksum {actual}, recorded was {recorded}")
    try:
        fields = parse_json(data.decode("ascii"))
    except ValueError as error:
        raise SealError(f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise SealError("is not a JSON object")
    return fields


def read_sealed(
    path: Path, *, what: str, format_name: str, version: int, error: type[MegaresumeError]
) -> dict[str, Any]:
    """Read a sealed file of one of our formats.

    Args:
        path: the file.
        what: its name in errors: "the data state", "the manifest".
        format_name: the ``format`` member that it must have.
        version: the newest version that this code reads.
        error: the class to raise.

    Raises:
        error: missing, unreadable, empty, truncated, damaged, or another kind of file; each with its own text.
        NewerFormatError: intact, but with a later version.
    """
    try:
        data = read_file(path)
    except FileNotFoundError as problem:
        raise error(f"{what} is missing", found="no such file", expected=str(path)) from problem
    except OSError as problem:
        raise error.unreadable(what, problem, "a readable file", at=path) from problem
    try:
        fields = unseal(data)
    except SealError as problem:
        raise error(
            f"{what} {problem}",
            found=f"{path}, {len(data)} bytes",
            expected="the bytes that were written, which end with their checksum",
            cause="the disk was full, the file was copied in part or edited, or the storage is failing",
        ) from problem
    if fields.get("format") != format_name:
        raise error(
            f"{what} is another kind of file",
            found=f"{path}: format {fields.get('format')!r}",
            expected=f"format {format_name!r}",
            cause="a file was renamed or copied over another one",
        )
    found_version = fields.get("version")
    if not is_version(found_version, version, what, path):
        raise error(f"{what} has no version", found=f"{path}: version {found_version!r}", expected="an integer")
    return fields


def read_record(
    path: Path,
    make: Callable[[dict[str, Any]], T],
    *,
    what: str,
    format_name: str,
    version: int,
    error: type[MegaresumeError],
) -> T:
    """The result of ``make`` for the members of a sealed file: see `read_sealed`.

    Raises:
        error: also if a member is missing or has the wrong type, for which ``make`` raises KeyError, TypeError,
            ValueError or AttributeError.
    """
    fields = read_sealed(path, what=what, format_name=format_name, version=version, error=error)
    try:
        return make(fields)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise error.misshapen(what, problem, f"the fields of version {version}", at=path) from problem


def count(value: object) -> int:
    """The value, if it is a non-negative integer of at most 64 bits; otherwise ValueError."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.80} is not a count")
    return value


def text(value: object) -> str:
    """The value, if it is text without control characters; otherwise ValueError."""
    if not isinstance(value, str) or not (value.isprintable() or visible(value) == value):
        raise ValueError(f"{value!r:.80} is not text")
    return value


def rows(value: object) -> list[Any]:
    """The value, if it is a list; otherwise ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is not a list")
    return value


def flag(value: object) -> bool:
    """The value, if it is true or false; otherwise ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def members(value: object) -> dict[str, Any]:
    """The value, if it is an object; otherwise ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.80} is not an object")
    return value


def texts(value: object) -> tuple[str, ...]:
    """The value, if it is a list of texts; otherwise ValueError."""
    return tuple(map(text, rows(value)))


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "int": count,
    "str": text,
    "bool": flag,
    "tuple[str, ...]": texts,
}


def from_members(cls: type[T], found: Mapping[str, Any], /, **readers: Callable[[Any], Any]) -> T:
    """A dataclass, from the members of a record that have the names of its fields.

    Args:
        cls: a field is a count, a text, a flag or a tuple of texts, according to its type, or has one of ``readers``. A
            field that is added later needs a default, or older records could not be read.
        found: members that a later version added are ignored.
        readers: by name of the field. Its member must not be missing, even if the field has a default: to read older
            records, pass ``{"name": default, **found}``. They raise ValueError or TypeError.

    Raises:
        KeyError, ValueError, TypeError: a member is missing without a default or None allowed, or has another type.
        NotImplementedError: a mistake in the class: nothing reads a field of this type, or a reader has no field.
    """
    _check_readers(cls, tuple(readers))  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, kind, is_optional, has_default in _fields(cls):  # type: ignore[arg-type]
        read = readers.get(name)
        if read is None and name not in found and has_default:
            continue
        value = found.get(name) if is_optional and read is None else found[name]
        if is_optional and value is None:
            values[name] = None
        elif read is not None:
            values[name] = read(value)
        else:
            try:
                values[name] = _READERS[kind](value)
            except ValueError as error:
                raise ValueError(f"{name} {error}") from error
    return cls(**values)


@functools.lru_cache(maxsize=64)
def _check_readers(cls: Any, readers: tuple[str, ...]) -> None:
    """Raise NotImplementedError for a mistake in the class: not one of the errors that blame the file."""
    fields = _fields(cls)
    unread = [f"{name}: {kind}" for name, kind, *_ in fields if name not in readers and kind not in _READERS]
    unread += [f"a reader of {name}" for name in readers if name not in [field[0] for field in fields]]
    if unread:
        raise NotImplementedError(
            f"{cls.__name__} has {', '.join(unread)}: give from_members a reader for each field whose type is not one "
            f"of {', '.join(_READERS)}, or one of them | None"
        )


@functools.lru_cache(maxsize=64)
def _fields(cls: Any) -> tuple[tuple[str, str, bool, bool], ...]:
    """For every field: name, type, whether it may be None, whether it has a default."""
    missing = dataclasses.MISSING
    parts = [(field, *str(field.type).partition(" | ")) for field in dataclasses.fields(cls)]
    return tuple(
        (field.name, kind, bool(optional), (field.default, field.default_factory) != (missing, missing))
        for field, kind, optional, _ in parts
    )
