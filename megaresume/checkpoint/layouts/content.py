"""Whether one file can be what its name says: not empty, not cut short. Its end and its header are read, no more.

.pt .pth .bin    a zip archive (what ``torch.save`` writes): its directory lies at the end, so a torn one has none
.safetensors     its header says how long the file is
.json            it parses
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path

from megaresume.checkpoint.manifest import list_files

__all__ = ["file_problem", "file_problems", "read_json"]

#: bytes; safetensors allows no longer header.
_MAX_HEADER = 100_000_000
#: how files begin that ``torch.save(..., _use_new_zipfile_serialization=False)`` wrote: nothing marks their end.
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
#: not .distcp: a rank that had nothing to write leaves an empty one, and ``.metadata`` says which are needed.
_NOT_EMPTY = (".pt", ".pth", ".bin", ".safetensors", ".json", ".metadata")


def file_problems(directory: Path) -> list[str]:
    """What is wrong with the files below a directory: sentences, in order of the paths.

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
    """What is wrong with one file, as the rest of a sentence; None: nothing that can be seen."""
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
    with open(path, "rb") as file:
        head = file.read(len(_LEGACY))
    if head == _LEGACY:
        return None
    if not head.startswith(b"PK\x03\x04"):
        # A plain pickle ends with its STOP; anything else is not what torch.save writes.
        if head.startswith(b"\x80") and _last_byte(path) == b".":
            return None
        return f"is no archive of torch.save: it begins with {head[:4].hex()}"
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return f"is cut short: the directory at the end of the archive is not there ({size:,} bytes)"
    if not members:
        return "is an archive with nothing in it"
    return None


def _last_byte(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def _safetensors_problem(path: Path, size: int) -> str | None:
    with open(path, "rb") as file:
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
    """Parse a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
