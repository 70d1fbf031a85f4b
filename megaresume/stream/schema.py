"""Configurations as typed, frozen values: plain Python (of YAML or JSON) to dataclasses, by pydantic.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Patches(Options):
        size: Annotated[int, Within(1, 8192)] = 336

    read(Patches, {"size": 224}, "processor")   Patches(size=224)
    read(Patches, {"sise": 224}, "processor")   ConfigError: unknown key 'sise' in processor; did you mean 'size'?

Values are checked here, once; code that makes such a dataclass itself is trusted.

Pydantic takes longer to import than everything else at a start, so it is used only for values that are not plainly
valid: it decides on conversions, and words the errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import types
from collections.abc import Callable, Collection, Mapping
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from megaresume.stream.errors import ConfigError, near

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError
    from pydantic_core import CoreSchema, PydanticCustomError

T = TypeVar("T")
Taken = Callable[[Any], Any]


class Options:
    """Base of a frozen dataclass that `read` makes from a mapping; each key of the mapping is a field."""

    __slots__ = ()
    #: keys that other code reads, to be listed beside the fields in the error for an unknown key.
    ALSO: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        known = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]

        def check(value: Any) -> Any:
            if not isinstance(value, Mapping):
                return value
            for key in value:
                if key not in known:
                    raise _unknown_key(key, [*known, *cls.ALSO])
            return dict(value)

        return _before(check, handler(source))


@dataclasses.dataclass(frozen=True)
class Before:
    """Applies a function to a value before it is validated; the function raises `refused`."""

    function: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _before(self.function, handler(source))

    def plain(self, source: Any, inner: Taken) -> Taken:
        """See `_plain`."""
        return lambda value: inner(self.function(value))


@dataclasses.dataclass(frozen=True)
class After:
    """Applies a function to a validated value; the function raises `refused`."""

    function: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.function, handler(source))

    def plain(self, source: Any, inner: Taken) -> Taken:
        """See `_plain`."""
        return lambda value: self.function(inner(value))


@dataclasses.dataclass(frozen=True)
class Within:
    """An integer, or a finite number, from low to high, both included."""

    low: float
    high: float

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        if source is int:
            low, high = int(self.low), int(self.high)
            return _expecting(
                core_schema.int_schema(strict=True, ge=low, le=high), f"an integer from {self.low} to {self.high}"
            )
        number = core_schema.float_schema(strict=True, allow_inf_nan=False, ge=self.low, le=self.high)
        return _expecting(number, f"a number from {self.low:g} to {self.high:g}")

    def plain(self, source: Any, inner: Taken) -> Taken:
        """See `_plain`."""
        return lambda value: _sure(value, type(value) is source and self.low <= value <= self.high)


@dataclasses.dataclass(frozen=True)
class Items:
    """A tuple from a list that is not empty; a single value stands for a list of one."""

    #: what was expected, for every error about the value.
    expected: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = _before(functools.partial(self._items, source), handler(source))
        return schema if self.expected is None else _expecting(schema, self.expected)

    def plain(self, source: Any, inner: Taken) -> Taken:
        """See `_plain`."""
        return lambda value: inner(self._items(source, value))

    @staticmethod
    def _items(source: Any, value: Any) -> tuple[Any, ...]:
        length = None if Ellipsis in get_args(source) else len(get_args(source))
        found = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not found or length not in (None, len(found)):
            raise refused(expected=f"a list of {length or 'one or more'} values")
        return found


class Strict:
    """True or false, and nothing that merely converts to one."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.bool_schema(strict=True)

    def plain(self, source: Any, inner: Taken) -> Taken:
        """See `_plain`."""
        return inner


class NotEmpty:
    """A text of at least one character."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.str_schema(min_length=1)

    def plain(self, source: Any, inner: Taken) -> Taken:
        """See `_plain`."""
        return lambda value: _sure(inner(value), value != "")


def ListOf(expected: str) -> Before:
    """A tuple from a list, possibly empty; anything else is refused with these words."""

    def check(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise refused("{place} is not a list", found=_typed(value), expected=expected)
        return value

    return Before(check)


Truth = Annotated[bool, Strict()]
Texts = Annotated[tuple[str, ...], Items()]


def read(cls: Any, value: object, where: str, *, inside: str | None = None) -> Any:
    """The value as a ``cls``, which may be anything that pydantic knows; fields left out have their defaults.

    Args:
        cls: a dataclass of `Options`, most often.
        value: plain Python.
        where: its name in the configuration, for errors.
        inside: prefix of its keys' names, if not ``where``.

    Raises:
        ConfigError: naming the key, what was found and what was expected.
    """
    with contextlib.suppress(_UnsureError, ValueError):  # the error of a validator: pydantic finds it again
        return _plain(cls)(value)
    from pydantic import ValidationError

    try:
        return _adapter(cls).validate_python(value)
    except ValidationError as error:
        raise _config_error(error, where, where if inside is None else inside) from error


def read_kind(options: object, kinds: Mapping[str, type[T]], where: str, default: str | None = None) -> T:
    """An object of the class that ``kind`` names, read from the other options; a text is a kind without options.

    Raises:
        ConfigError: as `read`; no such kind.
    """
    data = {"kind": options} if isinstance(options, str) else read(dict[str, Any], options, where)
    kind = data.pop("kind", default)
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError.unknown(f"kind of {where}", kind, sorted(kinds), action=f"correct {where}.kind")
    found: T = read(kinds[kind], data, where)
    return found


def plain(value: Any) -> dict[str, Any]:
    """A dataclass of `Options` as JSON has it: every default written out, tuples as lists."""
    found: dict[str, Any] = _adapter(value.__class__).dump_python(value, mode="json")
    return found


def plain_kind(value: Any) -> dict[str, Any]:
    """The plain options from which `read_kind` makes the same object."""
    return {"kind": value.kind, **plain(value)}


def refused(headline: str = "bad value of {place}", **fields: Any) -> PydanticCustomError:
    """The error for a validator to raise; `read` turns it into a `ConfigError`.

    Args:
        headline: ``{place}`` stands for the place in the configuration.
        fields: of `ConfigError`; ``at``: keys below the validated value; ``key``: an unknown one.
    """
    from pydantic_core import PydanticCustomError

    return PydanticCustomError("refused", "refused", {"headline": headline, **fields})


def check_keys(data: Mapping[Any, Any], known: Collection[str], where: str, also: Collection[str] = ()) -> None:
    """Refuse unknown keys, with a `ConfigError`."""
    for key in data:
        if key not in known:
            raise _worded(_unknown_key(key, [*known, *also]).context or {}, where, key)


def _before(function: Callable[[Any], Any], schema: CoreSchema) -> CoreSchema:
    from pydantic_core import core_schema

    return core_schema.no_info_before_validator_function(function, schema)


def _expecting(schema: CoreSchema, expected: str) -> CoreSchema:
    from pydantic_core import core_schema

    return core_schema.custom_error_schema(
        schema, "refused", custom_error_message="{expected}", custom_error_context={"expected": expected}
    )


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def _unknown_key(key: object, known: Collection[str]) -> PydanticCustomError:
    return refused(
        f"unknown key '{key}' in {{place}}",
        found=repr(key),
        expected=f"one of {', '.join(sorted(known))}" if known else "no options",
        cause=near(key, known),
        action="correct or remove the key",
        key=key,
    )


def _config_error(error: ValidationError, where: str, inside: str) -> ConfigError:
    one = error.errors(include_url=False)[0]
    context: dict[str, Any] = one.get("ctx", {}) if one["type"] == "refused" else _of_pydantic(one)
    keys = [*one["loc"], *context.get("at", ())]
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys if key != "[key]")
    return _worded(context, f"{inside}{path}".removeprefix(".") if path else where, one["input"])


def _worded(context: Mapping[str, Any], place: str, value: object) -> ConfigError:
    return ConfigError(
        context.get("headline", "bad value of {place}").replace("{place}", place),
        found=context.get("found", f"{value!r:.80}"),
        expected=context["expected"],
        cause=context.get("cause"),
        action=context.get("action", f"correct {place}"),
    )


def _of_pydantic(error: Any) -> dict[str, Any]:
    """Words for pydantic's own errors."""
    kind, value = error["type"], error["input"]
    if kind in ("dataclass_type", "dict_type", "mapping_type"):
        return {"headline": "{place} is not a mapping", "found": _typed(value), "expected": "keys and values"}
    if kind == "missing":
        return {"headline": "{place} is missing", "found": ", ".join(map(str, value)), "expected": "a value"}
    if kind == "literal_error":
        choices = re.findall(r"'(.*?)'", error["ctx"]["expected"])
        return {"expected": f"one of {', '.join(choices)}", "cause": near(value, choices)}
    words = {"bool_type": "true or false", "string_type": "a text", "tuple_type": "a list"}
    return {"expected": words.get(kind, str(error["msg"]).removeprefix("Input should be "))}


def _typed(value: object) -> str:
    return f"{type(value).__name__}: {value!r:.60}"


class _UnsureError(Exception):
    """The value is not plainly valid, so pydantic must decide."""


def _sure(value: T, is_plain: bool) -> T:
    if not is_plain:
        raise _UnsureError
    return value


@functools.cache
def _plain(kind: Any) -> Taken:
    """Convert plainly valid values as pydantic does, and raise `_UnsureError` for all others.

    Args:
        kind: a dataclass of `Options`, or the type of one of its fields.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if kind in (bool, int, str):
        return lambda value: _sure(value, type(value) is kind)
    if origin is Literal:
        return lambda value: _sure(value, type(value) is str and value in parts)
    if origin is Annotated:
        return _annotated(*parts)
    if origin in (Union, types.UnionType) and len(parts) == 2 and parts[1] is types.NoneType:
        inner = _plain(parts[0])
        return lambda value: None if value is None else inner(value)
    if origin is dict:
        key, item = map(_plain, parts)
        return lambda value: {key(k): item(v) for k, v in _sure(value, type(value) is dict).items()}
    if origin is tuple and len(parts) == 2 and parts[1] is Ellipsis:
        one = _plain(parts[0])
        return lambda value: tuple(map(one, _sure(value, type(value) in (list, tuple))))
    if isinstance(kind, type) and issubclass(kind, Options):
        return _options(kind)
    return lambda value: _sure(value, False)


def _annotated(source: Any, *markers: Any) -> Taken:
    taken = _plain(source)
    for marker in markers:
        taken = marker.plain(source, taken)
    return taken


def _options(kind: type[Options]) -> Taken:
    hints = get_type_hints(kind, include_extras=True)
    fields = [f for f in dataclasses.fields(kind) if f.init]  # type: ignore[arg-type]
    missing = dataclasses.MISSING
    needed = {f.name for f in fields if f.default is missing and f.default_factory is missing}
    taken = {f.name: _plain(hints[f.name]) for f in fields}

    def options(value: Any) -> Any:
        _sure(value, isinstance(value, Mapping) and needed <= value.keys() <= taken.keys())
        return kind(**{key: taken[key](item) for key, item in value.items()})

    return options
