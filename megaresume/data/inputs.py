"""The files that `megaresume prepare` reads: which ones, in which order, in which format.

In a directory: the files that match a pattern, following links, each directory once; or the files of a Hugging Face
dataset. Shards: braces, wildcards, Energon directories, URLs.
"""

from __future__ import annotations

import glob
import json
import os
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal

from megaresume.data.record_index import SUFFIX
from megaresume.data.remote import INSTALL, RemoteStore, is_url
from megaresume.data.shard_files import ShardFiles
from megaresume.stream.errors import CorpusError, UsageError, require

#: json: one array of rows; csv: rows under a header.
Format = Literal["text", "jsonl", "json", "csv"]

FORMATS: dict[str, Format] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    #: The kind of input by suffix; each row of a table is read as a JSON line.
    ".parquet": "jsonl",
    ".arrow": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
TABLES = (".parquet", ".arrow")


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file of the input."""

    path: Path
    format: Format
    #: size in bytes, as on disk.
    size: int
    mtime_ns: int = 0
    #: if it is on an object store: the URL, an identity that changes when it is written again, and its reader.
    url: str | None = None
    identity: str = ""
    store: ShardFiles | None = field(default=None, compare=False, repr=False)
    #: the key of the text or the messages in its rows, if it is an unusual one.
    key: str | None = field(default=None, compare=False)
    #: device and inode of a local file.
    inode: tuple[int, int] | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The path or URL, to show to people and to find the file again."""
        return self.url or str(self.path)

    @property
    def compressed(self) -> bool:
        """Whether the file is compressed, judging by its name, or CSV: it cannot be read from the middle."""
        return self.path.suffix in (*COMPRESSIONS, *TABLES) or self.format == "csv"

    def to_dict(self) -> dict[str, object]:
        """The fields by which a rerun recognizes the file; plain JSON."""
        changes = {"mtime_ns": self.mtime_ns} if self.url is None else {"identity": self.identity}
        return {"path": self.name, "format": self.format, "size": self.size, **changes}


@dataclass(frozen=True, slots=True)
class Inputs:
    """The files to read."""

    files: list[InputFile]
    #: links to files or directories that are already read under another path.
    linked_twice: list[Path]


def find_inputs(
    paths: Sequence[str | Path],
    *,
    glob: str = "**/*",
    format: Format | None = None,
    store: ShardFiles | None = None,
    repeats: bool = False,
) -> Inputs:
    """Files in the order given; within a directory, the files that match, sorted by path.

    In a directory, any file without a suffix of JSON lines counts as text, such as source code. Names that begin with a
    dot are skipped. Links to files and to directories are followed, each directory is read once.

    Args:
        paths: files and directories.
        glob: for directories, with ``**`` for any depth.
        format: for all files, whatever their names.
        store: reads URLs.
        repeats: read a file twice if it is given twice.

    Raises:
        UsageError: no such file, an unknown suffix, a directory without a match, a file given twice.
        CorpusError: a broken link, a directory that cannot be read.
    """
    inputs, linked_twice = [], []
    for named in paths:
        path = Path(named)
        if store is not None and "://" in str(named):
            inputs.append(_remote(str(named), format or _known_format(path), store))
        elif path.is_dir():
            saved = _saved_dataset(path)
            files, twice = (saved, []) if saved is not None else _files_below(path, glob)
            linked_twice += twice
            if not files:
                raise UsageError(
                    f"no file in {path} matches",
                    found=f"--glob {glob!r}",
                    expected="at least one file; names that begin with a dot do not count",
                    action="correct --glob, for example --glob '**/*.py'",
                )
            below = [_input(file, format or _format(file) or "text") for file in files]
            linked = [] if saved is not None else _links_of(below)
            linked_twice += [file.path for file in linked]
            inputs += [file for file in below if file not in linked] if linked else below
        elif path.is_file():
            inputs.append(_input(path, format or _known_format(path)))
        else:
            raise UsageError(
                f"{path} does not exist",
                found="no such file or directory",
                expected="files and directories to read",
                action="check the path",
            )
    if not repeats:
        _check_once(inputs)
    return Inputs(inputs, linked_twice)


def _input(path: Path, format: Format) -> InputFile:
    stat = path.stat()
    inode = (stat.st_dev, stat.st_ino)
    return InputFile(path=path, format=format, size=stat.st_size, mtime_ns=stat.st_mtime_ns, inode=inode)


def _same(inputs: Sequence[InputFile]) -> list[list[InputFile]]:
    """Find paths that lead to the same file; hard links count as separate files."""
    of_one: dict[object, list[InputFile]] = {}
    for file in inputs:
        of_one.setdefault(file.url or file.inode, []).append(file)
    several = [found for found in of_one.values() if len(found) > 1]
    by_path: dict[str, list[InputFile]] = {}
    for file in (file for found in several for file in found):
        by_path.setdefault(file.url or os.path.realpath(file.path), []).append(file)
    return [found for found in by_path.values() if len(found) > 1]


def _links_of(below: Sequence[InputFile]) -> list[InputFile]:
    """The links to other files of the same directory."""
    linked = []
    for same in _same(below):
        kept = next((file for file in same if not file.path.is_symlink()), same[0])
        linked += [file for file in same if file is not kept]
    return linked


def _check_once(inputs: Sequence[InputFile]) -> None:
    for first, second, *_ in _same(inputs):
        by_another = "by another path, or a link" if first.name != second.name else "an input that is given twice"
        raise UsageError(
            f"{first.name} would be read twice",
            found=f"{first.name} and {second.name}, which are one file",
            expected="each file once: its documents would be trained on twice as often",
            cause=f"{by_another}, or a directory beside a file in it",
            action="leave one of them out; to train on it more often, give its source a larger weight in data.yaml; "
            "or, if it is meant: --repeat-inputs",
        )


def _remote(url: str, format: Format, store: ShardFiles) -> InputFile:
    """A file in an object store.

    Raises:
        CorpusError, SetupError: it is not there, or the store does not answer.
    """
    identity = store.identity(url)
    size, path = int(identity.partition(":")[0]), Path(url.partition("://")[2])
    return InputFile(path=path, format=format, size=size, url=url, identity=identity, store=store)


def is_text(path: str) -> bool:
    """Whether its name is that of a text file or of rows."""
    return _format(Path(path)) is not None


def _known_format(path: Path) -> Format:
    known = _format(path)
    if known is None:
        raise UsageError(
            f"{path} has an unknown suffix",
            found=repr("".join(path.suffixes)),
            expected=f"one of {', '.join(FORMATS)}, alone or with {', '.join(COMPRESSIONS)}",
            action="say what it is: --format text, jsonl, json (an array of rows) or csv",
        )
    return known


def _format(path: Path) -> Format | None:
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes = suffixes[:-1]
    return FORMATS.get(suffixes[-1].lower()) if suffixes else None


def _files_below(directory: Path, pattern: str) -> tuple[list[Path], list[Path]]:
    """Files that match, sorted by path; and links to directories that are already read under another path.

    Names that begin with a dot are skipped. Real directories are visited first, so that a link to one of them is what
    gets skipped, as does a link to a parent directory, which would never end.

    Args:
        directory: where to look.
        pattern: of paths in it, with ``**`` for any depth.

    Raises:
        UsageError: the pattern is invalid.
        CorpusError: a matching link is broken; a directory cannot be read.
    """
    wanted = _parts(pattern)
    files: list[Path] = []
    twice: list[Path] = []
    seen: set[tuple[int, int]] = set()
    waiting, links = deque([directory]), deque[Path]()
    while waiting or links:
        here = waiting.popleft() if waiting else links.popleft()
        found = here.stat()
        if (found.st_dev, found.st_ino) in seen:
            twice.append(here)
            continue
        seen.add((found.st_dev, found.st_ino))
        for entry in _entries(here):
            path = here / entry.name
            # Not `entry.is_dir()`, which raises for a link to itself.
            if path.is_dir() if entry.is_symlink() else entry.is_dir():
                (links if entry.is_symlink() else waiting).append(path)
            elif _matches(path.relative_to(directory).parts, wanted):
                if path.is_file() if entry.is_symlink() else entry.is_file():
                    files.append(path)
                elif entry.is_symlink():
                    raise CorpusError(
                        f"{path} is a broken link",
                        found=os.readlink(path),
                        expected="a link to a file or a directory",
                        cause="its target was moved, or is on a disk that is not mounted here",
                        action="correct or remove the link, or leave it out by --glob",
                    )
    return sorted(files, key=lambda file: file.relative_to(directory).as_posix()), twice


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        raise CorpusError(
            f"{directory} cannot be read",
            found=error.strerror or str(error),
            expected="a directory that can be listed: its files would be missing from the corpus",
            action=f"check: ls -ld {directory}",
        ) from error


def _parts(pattern: str) -> tuple[str, ...]:
    parts = PurePosixPath(pattern).parts
    if not parts or pattern.startswith("/") or any("**" in part and part != "**" for part in parts):
        raise UsageError(
            "bad --glob",
            found=repr(pattern),
            expected="a pattern of names below the directory, ** alone between two slashes",
            action="correct --glob, for example --glob '**/*.py'",
        )
    return parts


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path matches, name by name; ``**`` matches any number of directories."""
    if not pattern or not names:
        return not pattern and not names
    if pattern[0] == "**":
        rest = pattern[1:] or ("*",)
        return any(_matches(names[k:], rest) for k in range(len(names)))
    return fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def _saved_dataset(directory: Path) -> list[Path] | None:
    """The files of a dataset that ``save_to_disk`` wrote, in its order; None if there is none.

    Raises:
        UsageError: several datasets.
        CorpusError: rows were selected or reordered without being written; a file is missing.
    """
    if (directory / "dataset_dict.json").is_file():
        splits = json.loads((directory / "dataset_dict.json").read_bytes())["splits"]
        raise UsageError(
            f"{directory} holds several datasets",
            found=", ".join(splits),
            expected="one, as a directory with state.json",
            action=f"name it: {os.fspath(directory / splits[0])}",
        )
    if not ((state := directory / "state.json").is_file() and (directory / "dataset_info.json").is_file()):
        return None
    said = json.loads(state.read_bytes())
    files = [directory / entry["filename"] for entry in said["_data_files"]]
    missing = [file.name for file in files if not file.is_file()]
    if said.get("_indices_files") or missing:
        raise CorpusError(
            f"{directory} is not a whole dataset",
            found=f"without {', '.join(missing)}" if missing else "rows that were selected and not written",
            expected="the files that state.json names, and no others",
            cause="an interrupted copy" if missing else "an old version of datasets",
            action="copy the directory again" if missing else "load it and write it again: save_to_disk",
        )
    return files


META = ".nv-meta"
_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def is_shards(path: str | os.PathLike[str]) -> bool:
    """Whether an input means tar shards (also compressed ones, which are refused by name later)."""
    return os.fspath(path).endswith(_SUFFIXES) or is_energon(path)


def is_index(path: str | os.PathLike[str]) -> bool:
    """Whether it is an index of shards that ``megaresume prepare`` wrote."""
    return os.fspath(path).endswith(SUFFIX)


def is_energon(path: str | os.PathLike[str]) -> bool:
    """Whether it is a directory prepared by Energon."""
    return not is_url(os.fspath(path)) and Path(path, META).is_dir()


def expanded(path: str | os.PathLike[str]) -> str:
    """A path or URL with ``$VARIABLES`` and ``~`` expanded; unknown variables stay, so that the error shows them."""
    return os.path.expanduser(os.path.expandvars(os.fspath(path)))


def join(base: str | os.PathLike[str], path: str) -> str:
    """A path or URL relative to a directory or URL; an absolute one is unchanged."""
    base = os.fspath(base)
    if "://" in path or os.path.isabs(path):
        return path
    return f"{base.rstrip('/')}/{path}" if "://" in base else os.path.join(base, path)


def expand_shards(patterns: Sequence[str | os.PathLike[str]], base: str | os.PathLike[str] = ".") -> list[str]:
    """The shards that patterns match, in the order given; those of a wildcard sorted.

    Args:
        patterns: ``shards/pairs-{000000..000127}.tar``, ``shards/*.tar``, ``s3://bucket/pairs-{0..9}.tar``.
        base: the base of relative patterns.

    Raises:
        UsageError: unbalanced braces; a shard given twice.
        CorpusError: a wildcard that matches nothing.
    """
    shards: list[str] = []
    for pattern in patterns:
        text = expanded(pattern)
        for path in braces(text):
            shards += _expanded(join(base, path))
    check_distinct(shards)
    return shards


def check_distinct(shards: Sequence[str]) -> None:
    """Raises UsageError: a shard given twice."""
    # By what they resolve to: with another spelling or a link, every record would be trained twice.
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
    """Expand a pattern with braces, as a shell does.

    Raises:
        UsageError: unbalanced braces.
        SetupError: the library that expands them is missing.
    """
    if "{" not in pattern and "}" not in pattern:
        return [pattern]
    braceexpand = require("braceexpand", f"it expands {pattern}", INSTALL).braceexpand
    try:
        return list(braceexpand(pattern, escape=False))
    except ValueError as error:
        raise UsageError(
            "braces that do not close",
            found=pattern,
            expected="for example pairs-{000000..000127}.tar",
            action="correct the pattern, in quotes for the shell",
        ) from error


def portable(path: str, index: Path) -> str:
    """The name of a shard in an index: relative if the shard is below the index's directory, so that both can move."""
    if "://" in path:
        return path
    absolute = Path(os.path.abspath(path))
    directory = Path(os.path.abspath(index)).parent
    return absolute.relative_to(directory).as_posix() if absolute.is_relative_to(directory) else str(absolute)


def resolved(path: str, index: Path) -> str:
    """The path that an index refers to."""
    return join(os.path.abspath(index.parent), path)


def _expanded(path: str) -> list[str]:
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
