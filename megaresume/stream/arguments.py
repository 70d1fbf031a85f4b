"""Checks the arguments of a settings dataclass: names and types. Where Python would raise a TypeError, our error names
the closest valid argument.

    @checked()
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Retries:
        tries: int = 3

    Retries(trys=2)      UsageError: unknown argument of Retries; did you mean 'tries'?
    Retries(tries="2")   UsageError: bad value of tries; write Retries(tries=2)
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import numbers
import os
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

from megaresume.stream.errors import UsageError, near, nearest

T = TypeVar("T")


def checked(
    otherwise: str = "docs/settings.md says what each setting does", *, types_too: bool = True
) -> Callable[[type[T]], type[T]]:
    """A decorator that makes a dataclass check its arguments.

    Args:
        otherwise: what to do about an unknown or missing name if none is similar.
        types_too: compare types as well as names.
    """

    def decorated(cls: type[T]) -> type[T]:
        made: Any = cls.__init__

        @functools.wraps(made)
        def __init__(self: T, *unnamed: Any, **given: Any) -> None:
            _check_names(cls, unnamed, given, otherwise)
            if types_too:
                check_types(cls, given)
            made(self, *unnamed, **given)

        cls.__init__ = __init__  # type: ignore[method-assign, assignment]
        return cls

    return decorated


def _check_names(cls: type[Any], unnamed: Sequence[Any], given: Mapping[str, Any], otherwise: str) -> None:
    """Raise a UsageError for an unknown, a positional or a missing argument."""
    call, fields = cls.__name__, dataclasses.fields(cls)
    known, by_place = [field.name for field in fields], [field.name for field in fields if not field.kw_only]
    for name, value in given.items():
        if name not in known:
            raise unknown_name(f"{call}(", name, value, known, otherwise)
    if len(unnamed) > len(by_place):
        hints, value = typing.get_type_hints(cls), unnamed[len(by_place)]
        name = next((one for one in known if hints[one] is not Any and _fits(value, hints[one])), known[0])
        raise UsageError(
            f"{call} takes its settings by name",
            found=f"{call}({value!r:.80})",
            expected=f"one of {', '.join(known)}",
            action=f"write {call}({name}={value!r:.80})",
        )
    there = {*given, *by_place[: len(unnamed)]}
    missing = [field.name for field in fields if _is_needed(field) and field.name not in there]
    if missing:
        raise UsageError(
            f"{call} is given no {missing[0]}",
            found=f"{call}({', '.join(f'{name}={value!r:.40}' for name, value in given.items())})",
            expected=f"also {', '.join(missing)}",
            action=otherwise,
        )


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def unknown_name(call: str, name: str, value: Any, known: Sequence[str], otherwise: str) -> UsageError:
    """The error for an argument that a call does not take.

    Args:
        call: how it begins: "Checkpoints(".
        name, value: of the argument.
        known: the arguments that it takes.
        otherwise: what to do if no name is similar.
    """
    close = nearest(name, known)
    return UsageError.unknown(
        f"argument of {call.partition('(')[0]}",
        name,
        known,
        found=f"{call}{name}={value!r:.80})",
        action=otherwise if close is None else f"write {close}",
    )


def check_types(
    cls: type[Any], given: Mapping[str, Any], *, flag_of: Callable[[dataclasses.Field[Any]], str] | None = None
) -> None:
    """Raise a UsageError for a value of the wrong type. Nothing is converted.

    Args:
        cls: a dataclass of settings.
        given: values by field.
        flag_of: maps a field to its flag, or to its name in a file, if that is how it was given.
    """
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name not in given or _fits(value := given[field.name], hint := hints[field.name]):
            continue
        name = field.name if flag_of is None else flag_of(field)
        call = f"{cls.__name__}({name}={{!r:.80}})" if flag_of is None else f"{name} {{}}"
        literals = [part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is Literal]
        meant = _meant(value, hint)
        raise UsageError(
            f"bad value of {name}",
            found=call.format(value),
            expected=_expected(hint),
            cause=near(value, typing.get_args(literals[0])) if literals else None,
            action=f"correct {name}" if flag_of is not None or meant is None else f"write {call.format(meant)}",
        )


#: kind of a field -> the types of its values, numpy's numbers included, and its name in errors.
_KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a text"),
    types.NoneType: (types.NoneType, "None"),
    os.PathLike: (os.PathLike, "a path"),
    Mapping: (Mapping, "a mapping"),
    Callable: (Callable, "a function"),
}


def _fits(value: Any, hint: Any) -> bool:
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return isinstance(value, str) and value in parts
    if origin in (tuple, Sequence):
        is_list = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
        return is_list and all(_fits(one, parts[0]) for one in value)
    return isinstance(value, _KINDS[origin][0]) and (origin is bool or not isinstance(value, bool))


def _expected(hint: Any) -> str:
    origin, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(_expected(part) for part in parts)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin in (tuple, Sequence):
        return f"a list, each {_expected(parts[0])}"
    return _KINDS[origin][1]


def _meant(value: Any, hint: Any) -> Any:
    """What was probably meant: the number that a text spells, or a list of one; None if neither has the right type."""
    read: Any = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(value, str):
        with contextlib.suppress(ValueError, SyntaxError):
            read = ast.literal_eval(value)
    for meant in (read, (value,)):
        if meant is not None and _fits(meant, hint):
            return meant
    return None
