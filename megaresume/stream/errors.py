"""Errors, typed by who must act. Each says what is wrong, and where known found, expected, cause and next action.

They live in ``stream`` because it is the lowest package: everything else may import from here. Refusals that share a
shape are worded here, once; one that resembles no other is worded where it is raised:

    raise UsageError.unknown("writer", word, WRITERS)               a word that is not in a list; names the nearest
    raise ConfigError.unreadable(path, error, "a JSON object")      a file that cannot be opened, read or parsed
    require("pyarrow", "it reads .parquet", "pip install pyarrow")  a missing package, and how to install it

Text that others may have written is read and shown here, too: shown so that nothing in it hides what it says, and read
as JSON that may be damaged, with one kind of error for whatever is wrong with it.
"""

from __future__ import annotations

import difflib
import importlib
import json
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, NoReturn, Self

#: package that is imported -> the extra of ours that installs it.
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
        headline: one sentence, lower case, what is wrong.
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
        """The refusal of a word that is not in a list.

        Args:
            what: the word is, for people: "dtype".
            word: as it was given.
            known: all words that it may be, in the order in which they are shown.
            found: how it was given, if the word alone does not say.
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
        """The refusal of a file that cannot be opened, read or parsed.

        Args:
            what: the path, or what is in the file, for people.
            why: what was raised when it was read.
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


def _rebuild(cls: type[MegaresumeError], headline: str, fields: dict[str, object]) -> MegaresumeError:
    return cls(headline, **fields)  # type: ignore[arg-type]


class UsageError(MegaresumeError):
    """A flag or an argument is wrong. The caller must act; the command line exits with 2."""


class ConfigError(MegaresumeError):
    """data.yaml (or what stands for it) is wrong. Whoever wrote the configuration must act."""


class NoFileError(ConfigError):
    """A path of a configuration leads to no file. On a command line it is bad usage: the command exits with 2."""


class CorpusError(MegaresumeError):
    """A source's files are missing, damaged, or not what they were. Whoever keeps the corpora must act."""


class StateError(MegaresumeError):
    """A data state is missing, damaged, of another run, or does not fit. Never a silent fresh start."""


class NewerFormatError(StateError):
    """An intact file of a later format version: refused, and no reason to walk back to an older checkpoint."""


class CheckpointError(MegaresumeError):
    """A checkpoint directory is incomplete or damaged, or its pointers disagree."""


class SetupError(MegaresumeError):
    """The environment lacks something: a package, a device, disk space, a permission."""


class StreamExhausted(MegaresumeError):
    """The stream has an end (``max_epochs`` with ``on_exhausted: stop`` or ``drop``) and it was reached."""


def nearest(word: object, known: Collection[str]) -> str | None:
    """The known word of which another one may be a slip; None if none is similar."""
    return next(iter(difflib.get_close_matches(str(word), list(known), n=1)), None)


def near(word: object, known: Collection[str]) -> str | None:
    """The likely cause of a word that is not known: a slip of a similar one; None if none is similar."""
    close = nearest(word, known)
    return None if close in (None, word) else f"did you mean '{close}'?"


def missing_package(error: ModuleNotFoundError, what: str, extra: str | None = None) -> SetupError | None:
    """The command that installs a package whose import failed; None if it is in none of our extras.

    Args:
        error: of the import.
        what: that needs the package, for people.
        extra: of this project that brings all that is needed; default: the smallest that has the package.
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
    """A library that is needed now, imported.

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


#: Control characters but tab and line feed, line and paragraph separators, marks that turn the order of letters, and
#: halves of letters that no encoding has; those that stand for a byte of a path stay.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udc7f\udd00-\udfff]"
)


def visible(text: str) -> str:
    """Control characters as a Python string would spell them: ESC is ``\\x1b``."""
    return _HIDDEN.sub(lambda found: repr(found[0])[1:-1], text)


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def listed(words: Sequence[object], most: int, separator: str = ", ") -> str:
    """The first of them, and how many more there are: ``a, b, and 7 more``."""
    more = [f"and {len(words) - most:,} more"] if len(words) > most else []
    return separator.join([*map(str, words[:most]), *more])


def one_line(text: str) -> str:
    """Make a text printable as `visible` does, line feeds included: for a name within a line."""
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
    """A count of a record, which is held in 64 bits with a sign; a ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
        return value
    raise ValueError(f"{value!r} is not a count")


def parse_json(data: str | bytes) -> Any:
    """Read JSON: UTF-8, every number finite.

    Raises:
        ValueError: it is none; NaN or an infinite number in it, which could not be written again; nested deeper than
            Python's stack goes.
    """
    text = data if isinstance(data, str) else data.decode()
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
