"""Settings and flags: each is declared once, as a field of a frozen dataclass, with its type, default and help.

    keep_last: int | None = setting(None, "keep the newest K", metavar="K", hosts="megatron training")

    attach(engine, data, checkpoints=Checkpoints(keep_last=3))   the field itself
    --megaresume-keep-last 3                                     on the hosts named: `add_settings`

A program's own flags are fields too: ``micro_batch_size: int = flag(...)`` is ``--micro-batch-size``.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeVar

from megaresume.stream.arguments import checked
from megaresume.stream.errors import UsageError

T = TypeVar("T")
#: the command lines with flags for settings: a script of Megatron; one with Hugging Face's Trainer (under the
#: launcher); `megaresume.cluster.training`; ``megaresume plan``.
CommandLine = Literal["megatron", "trainer", "training", "plan"]
#: the prefix of flags for settings.
PREFIX = "--megaresume-"


def flag(default: Any = None, help: str = "", **options: Any) -> Any:
    """A field that is a flag of one program. ``options`` are passed to ``argparse.ArgumentParser.add_argument``."""
    return dataclasses.field(default=default, metadata={"help": help, "options": options})


def setting(
    default: Any,
    help: str,
    *,
    hosts: str = "",
    flag: str | None = None,
    refused: Mapping[CommandLine, str] = types.MappingProxyType({}),
    **options: Any,
) -> Any:
    """A field that is a setting.

    Args:
        default: of the field, and of its flags.
        help: one sentence, for flags, docs and docstrings.
        hosts: the command lines on which it is a flag.
        flag: its name there, without the prefix; default: the field's.
        refused: command lines on which the flag is refused -> why.
        options: as for `flag`.
    """
    metadata = {"help": help, "options": options, "hosts": tuple(hosts.split()), "flag": flag, "refused": refused}
    return dataclasses.field(default=default, metadata=metadata)


def described(cls: type[T]) -> type[T]:
    """Add type checks to a dataclass of settings, and a line for each setting to its docstring."""
    lines = [f"    {field.name}: {field.metadata['help']}." for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    first, *rest = (cls.__doc__ or "").rstrip().split("\n\n")
    cls.__doc__ = "\n\n".join([first, "\n".join(["    Args:", *(f"    {line}" for line in lines)]), *rest])
    return checked()(cls)


def group(cls: type[Any]) -> Any:
    """A field with a dataclass of settings; those that have ``training`` as a host get a flag."""
    return dataclasses.field(default_factory=cls, metadata={"group": cls})


def flag_of(field: dataclasses.Field[Any]) -> str:
    """The flag of a setting, such as ``--megaresume-keep-last``."""
    return PREFIX + (field.metadata["flag"] or field.name).replace("_", "-")


def add_settings(parser: Any, cls: type[Any], host: CommandLine) -> None:
    """Add a host's flags for a dataclass of settings; to other people's scripts in both spellings and without defaults,
    so that flags that were not given can be told apart.
    """
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, help, default = flag_of(field), field.metadata["help"], field.default
        if why := field.metadata.get("refused", {}).get(host):
            both = [name, "--" + name[2:].replace("-", "_")]
            parser.add_argument(*both, action=_Refuse, nargs="?", const=why, help=argparse.SUPPRESS)
        if host not in field.metadata.get("hosts", ()):
            continue
        if default not in (None, False, True, ()):
            help = f"{help} (default: {default})"
        if host in ("megatron", "trainer"):
            names, default = [name, name.replace("-", "_").replace("__", "--", 1)], True if default is True else None
        else:
            names = [name] if host == "training" else [f"--{name.removeprefix(PREFIX)}", name]
        options = _options(field, hints[field.name])
        dest = name.removeprefix("--" if host != "plan" else PREFIX).replace("-", "_")
        if field.default is True:
            options["action"] = argparse.BooleanOptionalAction  # --no-...
        parser.add_argument(*names, dest=dest, default=default, help=help, **options)


def add_flags(parser: argparse.ArgumentParser, cls: type[Any]) -> None:
    """Add a flag for every field, with its default in the help."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if "group" in field.metadata:
            add_settings(parser, field.metadata["group"], "training")
            continue
        kind, default = hints[field.name], field.default
        text = field.metadata.get("help", "")
        if kind is not bool and default is not None and default != ():
            text = f"{text} (default: {default})"
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=default, help=text, **_options(field, kind))


class _Refuse(argparse.Action):
    """The action of a flag that this program does not support; ``const`` is the reason."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} cannot be used here: {self.const}")


def _options(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    options = dict(field.metadata.get("options", {}))
    if hint is bool:
        return options | {"action": "store_true"}
    literal = next((a for a in (hint, *typing.get_args(hint)) if typing.get_origin(a) is Literal), None)
    if literal is not None and "type" not in options:
        options.setdefault("choices", typing.get_args(literal))
    return {"type": _scalar(hint)} | options


def _scalar(hint: Any) -> Any:
    """The type of one word in a field's value: ``int`` for ``int | None`` and for ``tuple[int, ...]``."""
    arguments = [a for a in typing.get_args(hint) if a is not type(None) and a is not Ellipsis]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) in (typing.Union, tuple):
        return _scalar(arguments[0])
    return type(arguments[0]) if typing.get_origin(hint) is typing.Literal else hint


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of exiting, so that one rank can report for all."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, action="--help lists the flags")


def parse_flags(cls: type[T], argv: Sequence[str], *, prog: str, description: str) -> T:
    """Parse words into a ``cls``. ``--some_flag`` means ``--some-flag``; abbreviations are refused.

    Raises:
        UsageError: an unknown flag or a bad value.
    """
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    add_flags(parser, cls)
    namespace = parser.parse_args([_dashes(word) for word in argv])
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(namespace).items()}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if (settings := field.metadata.get("group")) is not None:
            said = {
                one.name: values.pop(flag_of(one).removeprefix("--").replace("-", "_"))
                for one in dataclasses.fields(settings)
                if "training" in one.metadata.get("hosts", ())
            }
            values[field.name] = settings(**said)
    return cls(**values)


def take_settings(
    groups: Mapping[str, type[Any]], host: CommandLine, argv: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Extract our settings from the command line of another program; returns these, and the words that are not ours.

    Args:
        groups: dataclasses of settings, by name.
        host: the kind of command line.
        argv: without the program.

    Returns:
        group -> field -> value, for the fields that were given; the other words, in order.

    Raises:
        UsageError: a flag of ours that this host does not have, or a bad value.
    """
    if not any(_is_ours(word) for word in argv):
        return {}, list(argv)
    parser = _Parser(prog="megaresume", allow_abbrev=False, add_help=False)
    for cls in groups.values():
        add_settings(parser, cls, host)
    namespace, left = parser.parse_known_args(list(argv))
    for word in left:
        if _is_ours(word):
            known = sorted({_dashes(name) for name in parser._option_string_actions})
            raise UsageError.unknown("flag", word, known, found=word, action="correct or remove the flag")
    said: dict[str, dict[str, Any]] = {}
    for group_name, cls in groups.items():
        for field in dataclasses.fields(cls):
            value = getattr(namespace, flag_of(field).removeprefix("--").replace("-", "_"), None)
            if host in field.metadata.get("hosts", ()) and value is not None:
                said.setdefault(group_name, {})[field.name] = value
    return said, left


def _is_ours(word: str) -> bool:
    return _dashes(word).startswith((PREFIX, f"--no-{PREFIX.removeprefix('--')}"))


def _dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word
