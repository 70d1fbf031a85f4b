"""What a pickle says, without unpickling it: its opcodes are listed, nothing of it is ever built or called.

    {"dp_world_size": 2, "optimizer": None}   ->   ...  "dp_world_size"  2  "optimizer"  None

A checkpoint of DeepSpeed or Megatron-LM states its number of ranks only inside its pickles, and a distributed
checkpoint of PyTorch its list of files. A key of a dictionary is followed by its value, so that `value_after` finds
them; a string that was seen before is looked up in the pickle's memo.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

__all__ = ["Word", "archive_words", "value_after", "words"]

#: ``...`` stands for whatever is no text, number or None: the beginning of a list, a tensor, an object.
Word = str | int | float | None | EllipsisType

#: bytes; the pickle of a checkpoint holds no tensors. A larger one is no longer read word by word: seconds.
MAX_PICKLE = 16 << 20

_SILENT = frozenset({"PROTO", "FRAME", "STOP", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD", "POP", "POP_MARK"})
_CONSTANTS: dict[str, Word] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def words(data: bytes) -> Iterator[Word]:
    """The scalars of a pickle, in its order.

    Raises:
        ValueError: it is no pickle, or is cut short.
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
    except Exception as error:  # the listing fails in many ways on garbage
        raise ValueError(f"{type(error).__name__}: {error}") from error


def archive_words(path: Path) -> list[Word] | None:
    """The words of what ``torch.save`` wrote.

    Returns:
        None: it is no zip archive, has no pickle in it, or a huge one.

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
    """What follows the first ``key``; ``...`` where there is none."""
    if found is None:
        return ...
    for number, word in enumerate(found[:-1]):
        if word == key and isinstance(word, str):
            return found[number + 1]
    return ...
