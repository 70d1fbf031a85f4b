"""Options in YAML or JSON to frozen dataclasses and back: one reader beside each field.

size: int = option(336, integer(1, 8192))        a field with its reader
read_options(Patches, {"size": 224}, "processor")    -> Patches(size=224), or a ConfigError that names the key
plain(Patches(size=224))                              -> {"size": 224, ...}, every default written out
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from megaresume.stream.errors import ConfigError

__all__ = [
    "Reader",
    "boolean",
    "choice",
    "choose_kind",
    "integer",
    "json_mapping",
    "known_keys",
    "mapping",
    "number",
    "option",
    "optional",
    "plain",
    "read_options",
    "sequence",
    "string",
]

T = TypeVar("T")

#: (value as given, its name in the configuration) -> value as kept. Raises ConfigError.
Reader = Callable[[Any, str], Any]


def option(default: Any, read: Reader) -> Any:
    """A dataclass field with a default and the reader of its option."""
    return dataclasses.field(default=default, metadata={"read": read})


def read_options(cls: type[T], options: object, where: str, **given: Any) -> T:
    """``cls`` with the options; those left out have their defaults.

    Args:
        cls: a dataclass whose fields were made by `option`.
        options: the mapping, without ``kind``.
        where: its name in the configuration, for errors.
        given: fields that are no options.

    Raises:
        ConfigError: not a mapping, an unknown key, or a value that its reader refuses.
    """
    data = mapping(options, where)
    readers = {f.name: f.metadata["read"] for f in dataclasses.fields(cls) if "read" in f.metadata}  # type: ignore[arg-type]
    known_keys(data, readers, where)
    return cls(**given, **{key: readers[key](value, f"{where}.{key}") for key, value in data.items()})


def plain(value: Any) -> Any:
    """As JSON has it: dataclasses are mappings, tuples are lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def choose_kind(
    options: object, kinds: Collection[str], where: str, default: str | None = None
) -> tuple[str, dict[str, Any]]:
    """The ``kind`` of the options, and the others.

    Raises:
        ConfigError: not a mapping, or no such kind.
    """
    data = {"kind": options} if isinstance(options, str) else dict(mapping(options, where))
    kind = data.pop("kind", default)
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(
            f"unknown kind of {where}",
            found=repr(kind),
            expected=f"kind: one of {', '.join(sorted(kinds))}",
            cause=_near(str(kind), kinds),
            action=f"correct {where}.kind",
        )
    return kind, data


def mapping(value: object, where: str) -> Mapping[str, Any]:
    """The value itself, if it has keys."""
    if isinstance(value, Mapping):
        return value
    raise _bad(value, where, "keys and values")


def json_mapping(value: object, where: str) -> Mapping[str, Any]:
    """The value itself, if it has keys and JSON holds it without a change."""
    data = mapping(value, where)
    try:
        same = json.loads(json.dumps(data)) == data
    except (TypeError, ValueError):
        same = False
    if not same:
        raise _bad(value, where, "keys and values of JSON: texts, numbers, true, false, null, lists, mappings")
    return data


def known_keys(data: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse keys that nobody reads."""
    for key in data:
        if key not in known:
            raise ConfigError(
                f"unknown key '{key}' in {where}",
                found=repr(key),
                expected=f"one of {', '.join(sorted(known))}" if known else "no options",
                cause=_near(str(key), known),
                action="correct or remove the key",
            )


def integer(low: int, high: int) -> Reader:
    """An integer from low to high, both included."""

    def read(value: Any, where: str) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        raise _bad(value, where, f"an integer from {low} to {high}")

    return read


def number(low: float, high: float) -> Reader:
    """A finite number from low to high, both included."""

    def read(value: Any, where: str) -> float:
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and low <= value <= high
        ):
            return float(value)
        raise _bad(value, where, f"a number from {low:g} to {high:g}")

    return read


def boolean(value: Any, where: str) -> bool:
    """true or false."""
    if isinstance(value, bool):
        return value
    raise _bad(value, where, "true or false")


def string(value: Any, where: str) -> str:
    """A text, maybe empty."""
    if isinstance(value, str):
        return value
    raise _bad(value, where, "a text")


def choice(*choices: str) -> Reader:
    """One of the words."""

    def read(value: Any, where: str) -> str:
        if isinstance(value, str) and value in choices:
            return value
        raise _bad(value, where, f"one of {', '.join(choices)}", _near(str(value), choices))

    return read


def optional(read: Reader) -> Reader:
    """null, or what the reader accepts."""
    return lambda value, where: None if value is None else read(value, where)


def sequence(read: Reader, length: int | None = None) -> Reader:
    """A list, every item read by ``read``; a single item that is no list stands for a list of one."""

    def read_all(value: Any, where: str) -> tuple[Any, ...]:
        items = list(value) if isinstance(value, list | tuple) else [value]
        if not items or (length is not None and len(items) != length):
            raise _bad(value, where, f"a list of {length or 'one or more'} values")
        return tuple(read(item, f"{where}[{number}]") for number, item in enumerate(items))

    return read_all


def _bad(value: object, where: str, expected: str, cause: str | None = None) -> ConfigError:
    return ConfigError(
        f"bad value of {where}", found=f"{value!r:.80}", expected=expected, cause=cause, action=f"correct {where}"
    )


def _near(word: str, known: Collection[str]) -> str | None:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean '{close[0]}'?" if close else None
