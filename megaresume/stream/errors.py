"""Errors, typed by who must act. Each says what was found, what was expected, the likely cause, the next action.

They live in ``stream`` because it is the lowest package: everything else may import from here.
"""

from __future__ import annotations

import importlib
from typing import Any

from megaresume.stream.text import visible

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

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the fields when a worker process sends the error to its parent."""
        fields = {name: getattr(self, name) for name in ("found", "expected", "cause", "action")}
        return (_rebuild, (type(self), self.headline, fields))


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


def missing_package(error: ModuleNotFoundError, what: str, extra: str | None = None) -> SetupError | None:
    """What to install where an import failed; None if it is not a package of our extras.

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
