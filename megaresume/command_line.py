"""Shared by several commands: flags with dashes or underscores, numbers, ranges, and checks for required packages."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NoReturn

from megaresume.stream.errors import SetupError, UsageError, near

#: flags whose value is another program's flags, and so may begin with dashes.
_OF_OTHERS = frozenset({"--sbatch-options"})


def normalise(argv: Sequence[str]) -> list[str]:
    """``--save_interval=5`` as ``--save-interval=5``; leaves values, and everything after a lone ``--``, unchanged.

    ``--sbatch-options --exclusive`` becomes one word, with ``=``.
    """
    result: list[str] = []
    for i, word in enumerate(argv):
        if word == "--":
            return [*result, *argv[i:]]
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            word = flag.replace("_", "-") + equals + value
        if result and result[-1] in _OF_OTHERS:
            result[-1] += "=" + argv[i]
            continue
        result.append(word)
    return result


def or_near(word: str, known: Collection[str]) -> str:
    """`errors.near` for the end of a message; "" if no word is close."""
    meant = near(word, known)
    return "" if meant is None else f", {meant}"


class Parser(argparse.ArgumentParser):
    """Reports an unknown flag first, whatever else is missing because of it."""

    #: the words of the command line.
    words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Exit with the usage of this command."""
        known = self._option_string_actions
        own = self.words[: self.words.index("--")] if "--" in self.words else self.words
        flags = [word.partition("=")[0] for word in own if word.startswith("--")]
        unknown = [flag for flag in flags if not any(name.startswith(flag) for name in known)]
        if unknown:
            message = f"there is no flag {unknown[0]}{or_near(unknown[0], known)}"
        super().error(message)


def at_least(lowest: int) -> Callable[[str], int]:
    """A type for argparse: an integer that is at least ``lowest``."""

    def number(text: str) -> int:
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}, not {text}")
        return int(text)

    return number


def names_of(group: argparse._ArgumentGroup) -> list[str]:
    """The flags of a group, by their names in the namespace."""
    return [action.dest for action in group._group_actions]


def given_of(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Flags, with their dashes, whose value differs from the default.

    Args:
        args: with the ``parser`` of the command.
        names: in the namespace.
    """
    changed = [name for name in names if getattr(args, name) != args.parser.get_default(name)]
    return [f"--{name.replace('_', '-')}" for name in changed]


def number_range(flag: str, text: str, lowest: int) -> tuple[int, int]:
    """``A:B`` as (A, B), ``A`` as (A, A + 1).

    Args:
        flag: the name, for errors.
        text: the value.
        lowest: the least value of A, and its default.

    Raises:
        UsageError: it is not a range.
    """
    first, colon, stop = text.partition(":")
    try:
        numbers = int(first) if first else lowest, int(stop) if colon else int(first) + 1
    except ValueError:
        numbers = (0, -1)
    if not lowest <= numbers[0] < numbers[1] < 1 << 62:  # a position is an int64
        raise UsageError(
            f"bad range of {flag[2:]}",
            found=repr(text),
            expected=f"A:B with {lowest} <= A < B < 2^62: from A to B-1"
            + (" (steps are counted from 1)" if lowest else ""),
            action=f"for example {flag} {lowest}:{lowest + 8}",
        )
    return numbers


def need_packages(what: str, names: Iterable[str], *, extra: str) -> None:
    """Refuse if one of these packages is missing.

    Args:
        what: the command, in words.
        names: of modules.
        extra: the extra that installs them all.

    Raises:
        SetupError: names the missing ones, and the extra.
    """
    missing = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is None]
    if missing:
        raise SetupError(
            f"{what} needs packages that are not installed",
            found=f"no {', '.join(missing)}",
            action=f"pip install 'megaresume[{extra}]', or make demo in a clone",
        )
