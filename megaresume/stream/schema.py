"""What people wrote, as typed, frozen values: plain Python (of YAML or JSON) to dataclasses, by pydantic.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Patches(Options):
        size: Annotated[int, Within(1, 8192)] = 336

    read(Patches, {"size": 224}, "processor")   Patches(size=224)
    read(Patches, {"sise": 224}, "processor")   ConfigError: unknown key 'sise' in processor; did you mean 'size'?

Values are checked here, once; code that makes such a dataclass itself is trusted.

YAML that people wrote or disks damaged is parsed with one kind of error for whatever is wrong with it. PyYAML raises
what int(), dates and dictionaries raise for ``0x_``, ``2001-13-45`` or ``!!bool maybe``, and follows aliases forever:
nine lines in which each names the line before nine times stand for a billion values.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args

import yaml
from pydantic import BeforeValidator, GetCoreSchemaHandler, Strict, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from megaresume.stream.errors import ConfigError, NoFileError

T = TypeVar("T")


class Options:
    """Base of a frozen dataclass that `read` makes of a mapping, whose every key is one of its fields."""

    __slots__ = ()
    #: keys that something else reads, to be named beside the fields where a key is not known.
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

        return core_schema.no_info_before_validator_function(check, handler(source))


@dataclasses.dataclass(frozen=True)
class Within:
    """An integer, or a finite number, from low to high, both included."""

    low: float
    high: float

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if source is int:
            low, high = int(self.low), int(self.high)
            return _expecting(
                core_schema.int_schema(strict=True, ge=low, le=high), f"an integer from {self.low} to {self.high}"
            )
        number = core_schema.float_schema(strict=True, allow_inf_nan=False, ge=self.low, le=self.high)
        return _expecting(number, f"a number from {self.low:g} to {self.high:g}")


@dataclasses.dataclass(frozen=True)
class Items:
    """A tuple from a list that is not empty; a single value stands for a list of one."""

    #: what was expected, whatever is wrong with it.
    expected: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        length = None if Ellipsis in get_args(source) else len(get_args(source))

        def items(value: Any) -> tuple[Any, ...]:
            found = tuple(value) if isinstance(value, list | tuple) else (value,)
            if not found or length not in (None, len(found)):
                raise refused(expected=f"a list of {length or 'one or more'} values")
            return found

        schema = core_schema.no_info_before_validator_function(items, handler(source))
        return schema if self.expected is None else _expecting(schema, self.expected)


def ListOf(expected: str) -> BeforeValidator:
    """A tuple from a list, maybe empty; anything else is refused with these words."""

    def check(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise refused("{place} is not a list", found=_typed(value), expected=expected)
        return value

    return BeforeValidator(check)


Truth = Annotated[bool, Strict()]
Texts = Annotated[tuple[str, ...], Items()]


def read(cls: Any, value: object, where: str, *, inside: str | None = None) -> Any:
    """The value as a ``cls``, which may be anything that pydantic knows; fields left out have their defaults.

    Args:
        cls: a dataclass of `Options`, most often.
        value: plain Python.
        where: its name in the configuration, for errors.
        inside: what the names of its keys begin with, if that is not ``where``.

    Raises:
        ConfigError: naming the key, what was found and what was expected.
    """
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
        raise ConfigError(
            f"unknown kind of {where}",
            found=repr(kind),
            expected=f"kind: one of {', '.join(sorted(kinds))}",
            cause=near(kind, kinds),
            action=f"correct {where}.kind",
        )
    found: T = read(kinds[kind], data, where)
    return found


def plain(value: Any) -> dict[str, Any]:
    """A dataclass of `Options` as JSON has it: every default written out, tuples as lists."""
    found: dict[str, Any] = _adapter(value.__class__).dump_python(value, mode="json")
    return found


def plain_kind(value: Any) -> dict[str, Any]:
    """What `read_kind` makes the same object of."""
    return {"kind": value.kind, **plain(value)}


def refused(headline: str = "bad value of {place}", **fields: Any) -> PydanticCustomError:
    """What a validator raises; `read` makes a `ConfigError` of it.

    Args:
        headline: ``{place}`` stands for the place in the configuration.
        fields: of `ConfigError`; ``at``: keys below the value that is validated; ``key``: one that is not known.
    """
    return PydanticCustomError("refused", "refused", {"headline": headline, **fields})


def check_keys(data: Mapping[Any, Any], known: Collection[str], where: str, also: Collection[str] = ()) -> None:
    """Refuse keys that nobody reads, with a `ConfigError`."""
    for key in data:
        if key not in known:
            raise _worded(_unknown_key(key, [*known, *also]).context or {}, where, key)


def near(word: object, known: Collection[str]) -> str | None:
    """The likely cause of a word that is not known: a slip of a similar one."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f"did you mean '{close[0]}'?" if close else None


def _expecting(schema: CoreSchema, expected: str) -> CoreSchema:
    return core_schema.custom_error_schema(
        schema, "refused", custom_error_message="{expected}", custom_error_context={"expected": expected}
    )


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
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
    """Words for what pydantic itself refuses."""
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


#: values that the aliases of a file may stand for, beyond which it is not a configuration.
MAX_VALUES = 1_000_000

#: a character that JSON escapes in two halves, after an even number of backslashes.
_PAIR = re.compile(r"(?<!\\)((?:\\\\)*)\\u([dD][89aAbB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")


class UniqueKeyLoader(yaml.SafeLoader):
    """As YAML wants it: of two values of one key the library would drop the first without a word."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(
                    "in a mapping", node.start_mark, f"the key '{key.value}' occurs twice", key.start_mark
                )
            seen.add((key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key))
        return node


def parse_yaml(text: str, loader: Any = yaml.SafeLoader) -> Any:
    """The value of a YAML text, in plain Python. Nothing else is ever constructed.

    Args:
        text: of the file.
        loader: PyYAML's `SafeLoader`, or a class of it.

    Raises:
        yaml.YAMLError: it is not YAML, nested too deeply, within itself, or stands for too much.
    """

    try:
        reader = loader(_PAIR.sub(_as_one, text))
        try:
            node = reader.get_single_node()
            if node is None:
                return None
            _check_size(node)
            return reader.construct_document(node)
        finally:
            reader.dispose()
    except RecursionError as error:
        raise yaml.YAMLError("nested too deeply") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise yaml.YAMLError(f"a value that its kind does not allow: {error}") from error


def _as_one(pair: re.Match[str]) -> str:
    """What JSON escapes as two halves (outside of the first plane of Unicode) is one character in YAML."""
    slashes, high, low = pair.groups()
    return f"{slashes}\\U{0x10000 + ((int(high, 16) & 0x3FF) << 10) + (int(low, 16) & 0x3FF):08x}"


def read_mapping(path: Path, what: str, holds: str) -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        path: of the file.
        what: the file is, for errors: "a data config".
        holds: what is expected in it.

    Raises:
        ConfigError: missing, unreadable, not YAML, a key that stands in a mapping twice, or not a mapping.
    """
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"), UniqueKeyLoader)
    except OSError as error:
        raise NoFileError(
            f"{path} cannot be read", found=error.strerror, expected=f"{what} in YAML", action="check the path"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not YAML", found=str(error), expected=f"{what} in YAML", action=f"correct {path}"
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path} is not {what}",
            found="an empty file" if data is None else f"a {type(data).__name__}",
            expected=holds,
            action=f"correct {path}",
        )
    return data


def read_encoder(path: Path) -> dict[str, Any]:
    """The options of an encoder in a YAML file. Raises ConfigError as `read_mapping`."""
    return read_mapping(path, "an encoder", "a mapping with processor, template, tokenizer and so on")


def _check_size(node: yaml.Node) -> None:
    """Raise a `yaml.YAMLError` where aliases lead in a circle, or multiply."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node))
        if known == 0:
            raise yaml.YAMLError(f"it stands within itself, by an alias in line {node.start_mark.line + 1}")
        if known is not None:
            return known
        sizes[id(node)] = 0
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        total = 1 + sum(size(part) for part in inner)
        if total > MAX_VALUES:
            raise yaml.YAMLError(f"its aliases stand for more than {MAX_VALUES:,} values")
        sizes[id(node)] = total
        return total

    size(node)
