"""Which shards a user means: braces, wildcards, directories of Energon, URLs."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megaresume.data.record_index import SUFFIX
from megaresume.data.remote import RemoteStore, is_url, missing_library
from megaresume.stream.errors import CorpusError, UsageError

META = ".nv-meta"
_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def is_shards(path: str | os.PathLike[str]) -> bool:
    """Whether an input is meant as tar shards (compressed ones too: they are refused by name later)."""
    return os.fspath(path).endswith(_SUFFIXES) or is_energon(path)


def is_index(path: str | os.PathLike[str]) -> bool:
    """Whether it is an index that ``megaresume prepare`` wrote of shards."""
    return os.fspath(path).endswith(SUFFIX)


def is_energon(path: str | os.PathLike[str]) -> bool:
    """Whether it is a directory that Energon has prepared."""
    return not is_url(os.fspath(path)) and Path(path, META).is_dir()


def join(base: str | os.PathLike[str], path: str) -> str:
    """A path or URL relative to a directory or URL; one that is absolute stays."""
    base = os.fspath(base)
    if "://" in path or os.path.isabs(path):
        return path
    return f"{base.rstrip('/')}/{path}" if "://" in base else os.path.join(base, path)


def expand_shards(patterns: Sequence[str | os.PathLike[str]], base: str | os.PathLike[str] = ".") -> list[str]:
    """The shards that patterns name, in the order given; those of a wildcard sorted.

    Args:
        patterns: ``shards/pairs-{000000..000127}.tar``, ``shards/*.tar``, ``s3://bucket/pairs-{0..9}.tar``.
        base: what relative ones are relative to.

    Raises:
        UsageError: braces that do not close; one shard twice.
        CorpusError: a wildcard that matches nothing.
    """
    shards: list[str] = []
    for pattern in patterns:
        text = os.path.expanduser(os.path.expandvars(os.fspath(pattern)))
        for path in braces(text):
            shards += _matches(join(base, path))
    check_distinct(shards)
    return shards


def check_distinct(shards: Sequence[str]) -> None:
    """Raises UsageError: one shard twice."""
    # By where they lead: another spelling or a link would train on every record twice.
    places = [path if is_url(path) else os.path.realpath(path.removeprefix("file://")) for path in shards]
    if len(set(places)) < len(places):
        twice = next(place for place, count in Counter(places).items() if count > 1)
        raise UsageError(
            "one shard was given twice",
            found=", ".join(path for path, place in zip(shards, places, strict=True) if place == twice),
            expected="each shard once",
            action="correct the list of shards",
        )


def braces(pattern: str) -> list[str]:
    """What a pattern with braces stands for, as in a shell.

    Raises:
        UsageError: they do not close.
        SetupError: the library that expands them is missing.
    """
    if "{" not in pattern and "}" not in pattern:
        return [pattern]
    try:
        from braceexpand import braceexpand
    except ImportError as error:
        raise missing_library("braceexpand", f"it expands {pattern}") from error
    try:
        return list(braceexpand(pattern, escape=False))
    except ValueError as error:
        raise UsageError(
            "braces that do not close", found=pattern, expected="for example pairs-{000000..000127}.tar"
        ) from error


def portable(path: str, index: Path) -> str:
    """How an index names a shard: relative to itself where the shard lies below it, so that both can move."""
    if "://" in path:
        return path
    absolute = Path(os.path.abspath(path))
    directory = Path(os.path.abspath(index)).parent
    return absolute.relative_to(directory).as_posix() if absolute.is_relative_to(directory) else str(absolute)


def resolved(path: str, index: Path) -> str:
    """The place that an index means."""
    return join(os.path.abspath(index.parent), path)


def _matches(path: str) -> list[str]:
    if not any(c in path for c in "*?["):
        return [path]
    found = RemoteStore(path.partition("://")[0]).glob(path) if is_url(path) else sorted(glob.glob(path))
    if not found:
        raise CorpusError(
            f"{path} matches no file",
            found="no such file",
            expected="at least one",
            cause="a wrong path, or a pattern that the shell was meant to expand",
            action="check the path",
        )
    return found
