"""PyTorch's distributed checkpoints: ``__0_0.distcp`` files, and ``.metadata``, which lists what each must hold.

Megatron-LM's ``torch_dist`` (with ``metadata.json``, and up to 0.18 ``common.pt``), ``torch_dcp`` and ``fsdp_dtensor``
are such directories, and so are FSDP's sharded states under Hugging Face and Megatron's under VeRL. ``.metadata`` is
written when every rank is done; Megatron's ``metadata.json`` after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from megaresume.checkpoint.files import read_file
from megaresume.checkpoint.foreign.base import MAX_PICKLE, Word, read_json, words

METADATA = ".metadata"
CONFIG = "metadata.json"
COMMON = "common.pt"

_NAME = re.compile(rb"__[0-9]+_[0-9]+\.distcp")


def is_distributed(directory: Path) -> bool:
    """Whether this is, or was meant to be, a distributed checkpoint."""
    marks = (METADATA, CONFIG, COMMON)
    return any((directory / name).exists() for name in marks) or any(directory.glob("__*.distcp"))


def has_common_state(directory: Path) -> bool:
    """Whether Megatron's ``torch_dist`` wrote here: its state that is no tensor is in a file, or among the shards.

    Raises:
        OSError: a file cannot be read.
    """
    metadata = directory / METADATA
    return (directory / COMMON).exists() or (metadata.exists() and b"common_state" in read_file(metadata))


def megatron_dist_problems(directory: Path) -> list[str]:
    """What is missing of what Megatron's ``dist_checkpointing.save`` writes.

    Raises:
        OSError: a file cannot be read.
    """
    try:
        config = read_json(directory / CONFIG)
    except FileNotFoundError:
        return [f"{CONFIG} is missing: it is written last, when every rank is done"]
    except ValueError:
        return []  # `file_problems` says so
    backend = config.get("sharded_backend") if isinstance(config, dict) else None
    if backend != "torch_dist":
        # zarr, up to 0.11: one directory for each tensor, with nothing that lists them.
        return [] if (directory / COMMON).exists() else [f"{COMMON} is missing"]
    return distributed_problems(directory, with_common=True)


def distributed_problems(directory: Path, *, with_common: bool = False) -> list[str]:
    """Hold the files against ``.metadata``.

    Args:
        directory: where they lie.
        with_common: Megatron's common state must be there, as a file or among the shards.

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
            found.append(f"{name} is missing, which {METADATA} names")
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
