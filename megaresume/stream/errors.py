"""Errors, typed by who must act. Each says what is wrong and, if known, found, expected, cause and next action.

They are in ``stream`` because everything else may import from this lowest package. Refusals with a common shape are
worded here; any other is worded where it is raised:

    raise UsageError.unknown("writer", word, WRITERS)               a word that is not in a list; names the nearest
    raise ConfigError.unreadable(path, error, "a JSON object")      a file that cannot be opened, read or parsed
    raise StateError.misshapen("the record", error, "the fields")   a record that lacks a field, or has a wrong one
    require("pyarrow", "it reads .parquet", "pip install pyarrow")  a missing package, and how to install it

Also here: showing text from elsewhere so that control characters hide nothing, and parsing JSON that may be damaged,
with one kind of error for every fault in it.
"""

from __future__ import annotations

import difflib
import importlib
import json
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, NoReturn, Self

#: imported package -> our extra that installs it.
EXTRAS = {
    "torch": "torch",
    "deepspeed": "deepspeed",
    "megatron": "megatron",
    "tokenizers": "text",
    "PIL": "vlm",
    "fsspec": "vlm",
    "matplotlib": "report",
    "libcst": "patch",
    "packaging": "patch",
    "tensorboard": "metrics",
    "opentelemetry": "metrics",
    "wandb": "metrics",
    "mlflow": "metrics",
}


class MegaresumeError(Exception):
    """Root of all errors that a user can act on; the command line prints it without a traceback.

    Args:
        headline: what is wrong: one sentence, lower case.
        found: what is there, with numbers.
        expected: what should be there, with numbers.
        cause: the likely cause.
        action: what to do next: a command, a flag, or a file to look at.
    """

    def __init__(
        self,
        headline: str,
        *,
        found: object = None,
        expected: object = None,
        cause: str | None = None,
        action: str | None = None,
    ) -> None:
        self.headline = headline
        self.found = found
        self.expected = expected
        self.cause = cause
        self.action = action
        super().__init__(headline)

    def __str__(self) -> str:
        parts = [
            ("found", self.found),
            ("expected", self.expected),
            ("likely cause", self.cause),
            ("next action", self.action),
        ]
        lines = [f"  {name + ':':<14}{value}" for name, value in parts if value is not None]
        return visible("\n".join([self.headline, *lines]))

    @property
    def line(self) -> str:
        """What is wrong and what was found, for a note or a log."""
        if self.found is None:
            return self.headline
        return f"{self.headline}{'' if str(self.found).startswith(chr(10)) else ': '}{self.found}"

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the fields when a worker process sends the error to its parent."""
        fields = {name: getattr(self, name) for name in ("found", "expected", "cause", "action")}
        return (_rebuild, (type(self), self.headline, fields))

    @classmethod
    def unknown(
        cls, what: str, word: object, known: Collection[str], *, found: str | None = None, action: str | None = None
    ) -> Self:
        """The error for a word that is not in a list.

        Args:
            what: what the word is, for people: "dtype".
            word: as given.
            known: all valid words, in the order in which to show them.
            found: how it was given, if the word alone does not tell.
            action: what to do next.
        """
        return cls(
            f"unknown {what}",
            found=repr(word) if found is None else found,
            expected=f"one of {', '.join(known)}",
            cause=near(word, known),
            action=action,
        )

    @classmethod
    def unreadable(
        cls, what: object, why: Exception, expected: str, *, at: object = None, action: str | None = None
    ) -> Self:
        """The error for a file that cannot be opened, read or parsed.

        Args:
            what: the path, or a description of the file's content.
            why: the exception from reading it.
            expected: what should be there.
            at: the path, if ``what`` does not name it.
            action: what to do next.
        """
        if isinstance(why, OSError):
            reason = why.strerror or str(why)
        else:
            reason = str(why) if isinstance(why, ValueError) else f"{type(why).__name__}: {why}"
        found = reason if at is None else f"{at}: {reason}"
        return cls(f"{what} cannot be read", found=found, expected=expected, action=action)

    @classmethod
    def misshapen(
        cls, what: str, why: Exception, expected: str, *, at: object = None, action: str | None = None
    ) -> Self:
        """The error for a record whose checksum is right, and that lacks a field or has one of the wrong kind.

        Args:
            what: the record, for people.
            why: the exception from reading its fields.
            expected: the fields that should be there.
            at: its path.
            action: what to do next.
        """
        reason = why.line if isinstance(why, MegaresumeError) else f"{type(why).__name__}: {why}"
        return cls(
            f"{what} lacks a field or has one of the wrong kind",
            found=reason if at is None else f"{at}: {reason}",
            expected=expected,
            cause="it was written by a faulty program: its checksum is right",
            action=action,
        )


def _rebuild(cls: type[MegaresumeError], headline: str, fields: dict[str, object]) -> MegaresumeError:
    return cls(headline, **fields)  # type: ignore[arg-type]


class UsageError(MegaresumeError):
    """A flag or an argument is wrong. The caller must act; the command line exits with 2."""


class ConfigError(MegaresumeError):
    """data.yaml (or an equivalent mapping) is wrong. Whoever wrote the configuration must act."""


class NoFileError(ConfigError):
    """A path in a configuration does not exist. On a command line this is bad usage: the command exits with 2."""


class CorpusError(MegaresumeError):
    """A source's files are missing, damaged, or have changed. Whoever keeps the corpora must act."""


class StateError(MegaresumeError):
    """A data state is missing, damaged, of another run, or does not fit. Never start over silently."""


class NewerFormatError(StateError):
    """An intact file of a later format version: refused, and no reason to fall back to an older checkpoint."""


class CheckpointError(MegaresumeError):
    """A checkpoint directory is incomplete or damaged, or its pointers disagree."""


class SetupError(MegaresumeError):
    """The environment lacks something: a package, a device, disk space, a permission."""


class StreamExhausted(MegaresumeError):
    """The stream has an end (``max_epochs`` with ``on_exhausted: stop`` or ``drop``) and it was reached."""


def nearest(word: object, known: Collection[str]) -> str | None:
    """The known word that another was probably meant to be; None if none is similar."""
    return next(iter(difflib.get_close_matches(str(word), list(known), n=1)), None)


def near(word: object, known: Collection[str]) -> str | None:
    """The likely cause of an unknown word: a misspelling of a similar one; None if none is similar."""
    close = nearest(word, known)
    return None if close in (None, word) else f"did you mean '{close}'?"


def missing_package(error: ModuleNotFoundError, what: str, extra: str | None = None) -> SetupError | None:
    """The error for a failed import, with the command that installs the package; None if none of our extras has it.

    Args:
        error: of the import.
        what: the feature that needs the package, for people.
        extra: our extra that installs everything needed; default: the smallest that has the package.
    """
    package = str(error.name).partition(".")[0]
    if package not in EXTRAS:
        return None
    return SetupError(
        f"{what} needs the package '{package}'",
        found=str(error),
        expected=f"an environment with {package}",
        action=f"pip install 'megaresume[{extra or EXTRAS[package]}]'",
    )


def require(library: str, expected: str, action: str) -> Any:
    """Import an optional library.

    Raises:
        SetupError: it is not installed.
    """
    name = library.partition(".")[0]
    try:
        importlib.import_module(name)
        return importlib.import_module(library)
    except ImportError as error:
        what = f"the library '{name}' is missing"
        raise SetupError(what, found=str(error), expected=expected, action=action) from error


#: Control characters except tab and line feed, line and paragraph separators, bidirectional marks, and lone surrogates
#: except those that stand for an undecodable byte of a path.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udc7f\udd00-\udfff]"
)


def visible(text: str) -> str:
    """Control characters escaped as in a Python string: ESC is ``\\x1b``."""
    return _HIDDEN.sub(lambda found: repr(found[0])[1:-1], text)


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def listed(words: Sequence[object], most: int, separator: str = ", ") -> str:
    """The first words, and how many more there are: ``a, b, and 7 more``."""
    more = [f"and {len(words) - most:,} more"] if len(words) > most else []
    return separator.join([*map(str, words[:most]), *more])


def one_line(text: str) -> str:
    """Escape a text as `visible` does, line feeds included, for a name within a line."""
    return visible(text).replace("\n", "\\n")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def as_count(value: object) -> int:
    """A count in a record, a signed 64-bit integer; a ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
        return value
    raise ValueError(f"{value!r} is not a count")


def parse_json(data: str | bytes) -> Any:
    """Read JSON: UTF-8, every number finite.

    Raises:
        ValueError: not JSON; it has NaN or an infinite number, which could not be written again; or nested too deeply
            for Python's stack.
    """
    text = data if isinstance(data, str) else data.decode()
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
