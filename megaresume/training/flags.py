"""A dataclass whose fields are command-line flags: ``micro_batch_size`` is ``--micro-batch-size``."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from megaresume.stream.errors import UsageError

__all__ = ["add_flags", "flag", "parse_flags"]

T = TypeVar("T")


def flag(default: Any = None, help: str = "", **options: Any) -> Any:
    """A field that is a flag. ``options`` go to ``argparse.ArgumentParser.add_argument``."""
    return dataclasses.field(default=default, metadata={"help": help, "options": options})


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that one rank can say it for all."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, action="--help lists the flags")


def add_flags(parser: argparse.ArgumentParser, cls: type[Any]) -> None:
    """Add a flag for every field; the default of each stands in its help."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        options = dict(field.metadata.get("options", {}))
        kind, default = hints[field.name], field.default
        text = field.metadata.get("help", "")
        if kind is bool:
            options["action"] = "store_true"
        else:
            options.setdefault("type", _scalar(kind))
            if default is not None and default != ():
                text = f"{text} (default: {default})"
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=default, help=text, **options)


def _scalar(hint: Any) -> Any:
    """The type that converts one word: ``int`` for ``int | None`` and for ``tuple[int, ...]``."""
    arguments = [a for a in typing.get_args(hint) if a is not type(None) and a is not Ellipsis]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) in (typing.Union, tuple):
        return _scalar(arguments[0])
    return type(arguments[0]) if typing.get_origin(hint) is typing.Literal else hint


def parse_flags(cls: type[T], argv: Sequence[str], *, prog: str, description: str) -> T:
    """Parse words into a ``cls``. ``--some_flag`` is ``--some-flag``; abbreviations are refused.

    Raises:
        UsageError: an unknown flag or a bad value.
    """
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    add_flags(parser, cls)
    namespace = parser.parse_args([_dashes(word) for word in argv])
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(namespace).items()}
    return cls(**values)


def _dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word
