"""What several commands read alike: flags with dashes or underscores, numbers, ranges; and the packages they need."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NoReturn

from megaresume.stream.errors import SetupError, UsageError, near

#: flags whose value is flags of another program: as it is, and also where it begins with dashes.
_OF_OTHERS = frozenset({"--sbatch-options"})


def normalise(argv: Sequence[str]) -> list[str]:
    """``--save_interval=5`` as ``--save-interval=5``; values, and everything after a lone ``--``, stay as they are.

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
    """`errors.near` for the end of a message; nothing, if no word is close."""
    meant = near(word, known)
    return "" if meant is None else f", {meant}"


class Parser(argparse.ArgumentParser):
    """Says first which flag it does not know, whatever else is missing for the want of it."""

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
    """A type for argparse: a whole number, this or more."""

    def number(text: str) -> int:
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}, not {text}")
        return int(text)

    return number


def names_of(group: argparse._ArgumentGroup) -> list[str]:
    """The flags of a group, by their names in the namespace."""
    return [action.dest for action in group._group_actions]


def given_of(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Flags, with their dashes, that were given another value than their default.

    Args:
        args: with the ``parser`` of the command.
        names: in the namespace.
    """
    changed = [name for name in names if getattr(args, name) != args.parser.get_default(name)]
    return [f"--{name.replace('_', '-')}" for name in changed]


def number_range(flag: str, text: str, lowest: int) -> tuple[int, int]:
    """``A:B`` as (A, B), ``A`` as (A, A + 1).

    Args:
        flag: whose value it is.
        text: the value.
        lowest: A, if it is left out, and the least that it may be.

    Raises:
        UsageError: it is none.
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
    """Refuse unless these packages are installed.

    Args:
        what: the command, in words.
        names: of modules.
        extra: what brings them all.

    Raises:
        SetupError: with those that are missing, and the extra.
    """
    missing = [name for name in names if importlib.util.find_spec(name.partition(".")[0]) is None]
    if missing:
        raise SetupError(
            f"{what} needs packages that are not installed",
            found=f"no {', '.join(missing)}",
            action=f"pip install 'megaresume[{extra}]', or make demo in a clone",
        )
