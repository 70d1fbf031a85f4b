"""Checkpoints of other programs: the common parts of their layouts, and what a file shows before it is loaded.

If megaresume saved, its manifest says what is complete. Otherwise the files are checked against the rules of their
layout (`foreign_layouts`), and `megaresume.runs.latest` chooses. Nothing is unpickled, and no tensor is read.

`Look` is the result for one checkpoint, `Layout` says how to get it. Pickles are read without unpickling: their opcodes
are listed, but nothing is built or called.

    {"dp_world_size": 2, "optimizer": None}   ->   ...  "dp_world_size"  2  "optimizer"  None

A checkpoint of DeepSpeed or Megatron-LM has its number of ranks only inside its pickles, and so does a distributed
checkpoint of PyTorch its list of files. A key of a dictionary is followed by its value, so that `value_after` finds
them; a repeated string is looked up in the pickle's memo.

Checks whether a file can be what its name says: not empty, not truncated. Only its end and its header are read.

    .pt .pth .bin    a zip archive (from ``torch.save``): its directory is at the end, so a torn one has none
    .safetensors     its header has the length of the file
    .json            it parses

PyTorch's distributed checkpoints: ``__0_0.distcp`` files, and ``.metadata``, which lists the content of each.

Megatron-LM's ``torch_dist`` (with ``metadata.json``, and up to 0.18 ``common.pt``), ``torch_dcp`` and ``fsdp_dtensor``
are such directories, and so are FSDP's sharded states under Hugging Face and Megatron's under VeRL. ``.metadata`` is
written when every rank has finished, and Megatron's ``metadata.json`` after that.
"""

from __future__ import annotations

import json
import os
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

from megaresume.checkpoint.records.manifest import list_files
from megaresume.files import open_file, read_file


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """The result of comparing a checkpoint with its layout."""

    #: why it is incomplete: sentences. Empty: nothing is missing.
    problems: tuple[str, ...] = ()
    #: notes for whoever loads it.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How one family of programs lays out its checkpoints."""

    #: its name for ``--layout``.
    name: str
    #: its name for people.
    title: str
    #: names of its checkpoint directories; group 1: the iteration.
    pattern: re.Pattern[str]
    #: the file that names the newest one; None if there is no such file.
    pointer: str | None
    #: whether the pointer only moves when a save is finished, so that anything newer was never finished.
    pointer_commits: bool
    #: whether `megaresume` may have written records beside the checkpoints.
    managed: bool
    #: finds further checkpoint directories, with any name.
    others: Callable[[Path], list[str]]
    #: examines one checkpoint directory, given the iteration in its name.
    look: Callable[[Path, int | None], Look]
    #: the iteration in the files, for directories whose name has none.
    number_inside: Callable[[Path], int | None] = lambda directory: None

    def number(self, name: str) -> int | None:
        """The iteration in a directory's name."""
        match = self.pattern.fullmatch(name)
        return int(match[1]) if match else None


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a circular link, or one to a place that this user may not look at


def subdirectories(root: Path) -> list[str]:
    """Names of the directories in a directory; empty if it does not exist.

    Raises:
        OSError: it cannot be listed.
    """
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if _is_dir(entry))
    except (FileNotFoundError, NotADirectoryError):
        return []


#: ``...`` stands for anything except text, number or None: the beginning of a list, a tensor, an object.
Word = str | int | float | None | EllipsisType

#: bytes; the pickle of a checkpoint has no tensors. Reading a larger one word by word would take seconds.
MAX_PICKLE = 16 << 20

_SILENT = frozenset({"PROTO", "FRAME", "STOP", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD", "POP", "POP_MARK"})
_CONSTANTS: dict[str, Word] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def words(data: bytes) -> Iterator[Word]:
    """The scalars of a pickle, in order.

    Raises:
        ValueError: it is not a pickle, or is truncated.
    """
    memo: dict[int, Word] = {}
    last: Word = ...
    try:
        argument: Any
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "MEMOIZE":
                memo[len(memo)] = last
            elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
                memo[argument] = last
            elif name not in _SILENT:
                if name in ("GET", "BINGET", "LONG_BINGET"):
                    last = memo.get(argument, ...)
                elif name in _CONSTANTS:
                    last = _CONSTANTS[name]
                elif isinstance(argument, str | int | float) and name not in ("GLOBAL", "INST"):
                    last = argument
                else:
                    last = ...
                yield last
    except ValueError:
        raise
    except Exception as error:  # for garbage, listing fails in many ways
        raise ValueError(f"{type(error).__name__}: {error}") from error


def archive_words(path: Path) -> list[Word] | None:
    """The words in a file of ``torch.save``.

    Returns:
        None if it is not a zip archive, or has no pickle in it, or a huge one.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.filename.endswith("data.pkl") and member.file_size <= MAX_PICKLE:
                    return list(words(archive.read(member)))
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError):
        return None
    return None


def value_after(found: Sequence[Word] | None, key: str) -> Word:
    """The word after the first ``key``; ``...`` if there is none."""
    if found is None:
        return ...
    for number, word in enumerate(found[:-1]):
        if word == key and isinstance(word, str):
            return found[number + 1]
    return ...


#: bytes; safetensors allows no longer header.
_MAX_HEADER = 100_000_000
#: the beginning of files from ``torch.save(..., _use_new_zipfile_serialization=False)``, whose end has no mark.
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
#: not .distcp: a rank with nothing to write leaves an empty one, and ``.metadata`` lists the needed ones.
_NOT_EMPTY = (".pt", ".pth", ".bin", ".safetensors", ".json", ".metadata")


def file_problems(directory: Path) -> list[str]:
    """What is wrong with the files below a directory: sentences, sorted by path.

    Raises:
        OSError: the directory cannot be read.
    """
    found = []
    for entry in list_files(directory):
        problem = file_problem(directory / entry.path)
        if problem is not None:
            found.append(f"{entry.path} {problem}")
    return found


def file_problem(path: Path) -> str | None:
    """What is wrong with one file, as the rest of a sentence; None if nothing is visible."""
    try:
        size = os.stat(path).st_size
        if size == 0:
            return "has 0 bytes" if path.name.endswith(_NOT_EMPTY) else None
        match path.suffix:
            case ".pt" | ".pth" | ".bin":
                return _archive_problem(path, size)
            case ".safetensors":
                return _safetensors_problem(path, size)
            case ".json":
                return _json_problem(path)
            case _:
                return None
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _archive_problem(path: Path, size: int) -> str | None:
    with open_file(path) as file:
        head = file.read(len(_LEGACY))
    if head == _LEGACY:
        return None
    if not head.startswith(b"PK\x03\x04"):
        # A plain pickle ends with STOP; anything else is not from torch.save.
        if head.startswith(b"\x80") and _last_byte(path) == b".":
            return None
        return f"is not a torch.save archive: it begins with {head[:4].hex()}"
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return f"is cut short: the directory at the end of the archive is not there ({size:,} bytes)"
    if not members:
        return "is an empty archive"
    return None


def _last_byte(path: Path) -> bytes:
    with open_file(path) as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def _safetensors_problem(path: Path, size: int) -> str | None:
    with open_file(path) as file:
        head = file.read(8)
        if len(head) < 8:
            return f"has {size} bytes, too few for a header"
        (length,) = struct.unpack("<Q", head)
        if length > _MAX_HEADER or 8 + length > size:
            return f"is cut short in its header: {size:,} bytes, the header alone has {8 + length:,}"
        text = file.read(length)
    try:
        header = json.loads(text)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return "has a header that cannot be read"
    if size != expected:
        return f"has {size:,} bytes, {expected:,} by its header"
    return None


def _json_problem(path: Path) -> str | None:
    try:
        read_json(path)
    except ValueError as error:
        return f"cannot be parsed: {error}"
    return None


def read_json(path: Path) -> object:
    """Parse a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON.
    """
    try:
        return json.loads(read_file(path))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


METADATA = ".metadata"
CONFIG = "metadata.json"
COMMON = "common.pt"

_NAME = re.compile(rb"__[0-9]+_[0-9]+\.distcp")


def is_distributed(directory: Path) -> bool:
    """Whether this is, or was meant to be, a distributed checkpoint."""
    marks = (METADATA, CONFIG, COMMON)
    return any((directory / name).exists() for name in marks) or any(directory.glob("__*.distcp"))


def has_common_state(directory: Path) -> bool:
    """Whether Megatron's ``torch_dist`` wrote here, with its non-tensor state in a file or among the shards.

    Raises:
        OSError: a file cannot be read.
    """
    metadata = directory / METADATA
    return (directory / COMMON).exists() or (metadata.exists() and b"common_state" in read_file(metadata))


def megatron_dist_problems(directory: Path) -> list[str]:
    """What is missing from the output of Megatron's ``dist_checkpointing.save``.

    Raises:
        OSError: a file cannot be read.
    """
    try:
        config = read_json(directory / CONFIG)
    except FileNotFoundError:
        return [f"{CONFIG} is missing: it is written last, when every rank is done"]
    except ValueError:
        return []  # `file_problems` reports it
    backend = config.get("sharded_backend") if isinstance(config, dict) else None
    if backend != "torch_dist":
        # zarr, up to 0.11: one directory for each tensor, not listed anywhere.
        return [] if (directory / COMMON).exists() else [f"{COMMON} is missing"]
    return distributed_problems(directory, with_common=True)


def distributed_problems(directory: Path, *, with_common: bool = False) -> list[str]:
    """Check the files against ``.metadata``.

    Args:
        directory: the checkpoint directory.
        with_common: also require Megatron's common state, as a file or among the shards.

    Raises:
        OSError: a file cannot be read.
    """
    try:
        data = read_file(directory / METADATA)
    except FileNotFoundError:
        return [f"{METADATA} is missing: it is written when every rank is done"]
    if not data.endswith(b"."):
        return [f"{METADATA} is cut short: {len(data):,} bytes"]
    found = []
    if with_common and not has_common_state(directory):
        found.append(f"{COMMON} is missing")
    ends: dict[str, int] = {name.decode(): 1 for name in _NAME.findall(data)}
    if len(data) <= MAX_PICKLE:
        try:
            for name, end in _ends(words(data)):
                ends[name] = max(ends.get(name, 1), end)
        except ValueError as error:
            return [f"{METADATA} cannot be read: {error}"]
    for name, end in sorted(ends.items()):
        try:
            size = (directory / name).stat().st_size
        except FileNotFoundError:
            found.append(f"{name}, which {METADATA} names, is missing")
            continue
        if size < end:
            found.append(f"{name} has {size:,} bytes, at least {end:,} by {METADATA}")
    return found


def _ends(found: Iterator[Word]) -> Iterator[tuple[str, int]]:
    """(file, offset + length) of every item: members of torch's ``_StorageInfo``, in this order."""
    path: str | None = None
    offset: int | None = None
    before: Word = ...
    for word in found:
        if before == "relative_path" and isinstance(word, str):
            path, offset = word, None
        elif before == "offset" and isinstance(word, int):
            offset = word
        elif before == "length" and isinstance(word, int) and path is not None and offset is not None:
            yield path, offset + word
            path, offset = None, None
        before = word
