"""The directory of a universal checkpoint that megaresume made: its names, its seal, whether it is whole.

The seal is a file in the directory: which save it was made of, every file with its size, and who asked for it. The
directory appears by rename with the seal in it, so that one without a seal is somebody else's.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from megaresume.checkpoint.manifest import list_files
from megaresume.checkpoint.sealed import read_sealed, seal
from megaresume.stream.errors import CheckpointError

__all__ = [
    "SEAL",
    "SUFFIX",
    "Maker",
    "Universal",
    "read_universal",
    "remove_converted",
    "remove_leftovers",
    "temporary_dir",
    "universal_dir",
    "write_seal",
]

SUFFIX = "_universal"
SEAL = "megaresume.json"
FORMAT = "megaresume.universal"
VERSION = 1

#: job: converted while a run was loading; command: by `megaresume convert`.
Maker = Literal["job", "command"]

_LEFTOVER = re.compile(r"\..+_universal\.(converting|removing)-[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Universal:
    """A universal checkpoint that is whole."""

    path: Path
    #: the save that it was made of.
    save_id: str
    made_by: Maker
    #: bytes.
    size: int


def universal_dir(tag_dir: Path) -> Path:
    """Where the universal form of a checkpoint lies: ``global_step4_universal`` beside ``global_step4``."""
    return tag_dir.with_name(tag_dir.name + SUFFIX)


def temporary_dir(tag_dir: Path, what: Literal["converting", "removing"] = "converting") -> Path:
    """A new name beside it that nobody reads."""
    return tag_dir.with_name(f".{tag_dir.name}{SUFFIX}.{what}-{os.urandom(4).hex()}")


def write_seal(directory: Path, *, save_id: str, made_by: Maker) -> Universal:
    """Seal a finished conversion, which has still its temporary name.

    Raises:
        OSError: the disk refuses.
    """
    files = list_files(directory)
    fields: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": save_id,
        "made_by": made_by,
        "files": [[entry.path, entry.size] for entry in files],
    }
    with open(directory / SEAL, "wb") as file:
        file.write(seal(fields, depth=1))
        file.flush()
        os.fsync(file.fileno())
    return Universal(path=directory, save_id=save_id, made_by=made_by, size=sum(entry.size for entry in files))


def read_universal(tag_dir: Path, save_id: str) -> Universal | None:
    """The universal form of a checkpoint, if there is one.

    Args:
        tag_dir: of the checkpoint.
        save_id: of its save.

    Returns:
        None: there is none.

    Raises:
        CheckpointError: there is one that cannot be taken: not ours, of another save, or with files missing.
    """
    directory = universal_dir(tag_dir)
    if not directory.is_dir():
        return None
    if not (directory / SEAL).exists():
        raise _refused(directory, f"a directory without {SEAL}", "it was converted by hand, perhaps not to its end")
    fields = read_sealed(
        directory / SEAL,
        what="the seal of the universal checkpoint",
        format_name=FORMAT,
        version=VERSION,
        error=CheckpointError,
    )
    if fields["save_id"] != save_id:
        raise _refused(directory, f"made of save {fields['save_id']}", "that step was saved again since")
    there = {entry.path: entry.size for entry in list_files(directory)}
    wrong = [f"{path} has {there.get(path, 'no')} of {size} bytes" for path, size in fields["files"]]
    wrong = [words for words, (path, size) in zip(wrong, fields["files"], strict=True) if there.get(path) != size]
    if wrong:
        raise _refused(directory, "; ".join(wrong[:5]), "files were deleted or cut short after the conversion")
    made_by: Maker = "job" if fields["made_by"] == "job" else "command"
    return Universal(
        path=directory, save_id=save_id, made_by=made_by, size=sum(int(size) for _, size in fields["files"])
    )


def _refused(directory: Path, found: str, cause: str) -> CheckpointError:
    source = directory.name.removesuffix(SUFFIX)
    return CheckpointError(
        f"{directory.name} is in the way of a universal checkpoint",
        found=f"{directory}: {found}",
        expected=f"none, or a whole one that megaresume made of {source}",
        cause=cause,
        action=f"rm -r {quote(str(directory))}    (or, to load it as it is, set load_universal)",
    )


def remove_converted(root: Path) -> None:
    """Remove what jobs have converted for themselves: a newer checkpoint was committed. Behind a commit, on rank 0.

    The files go in a thread of their own: there may be ten thousand of them.
    """
    gone: list[Path] = []
    for path in _listed(root):
        if _LEFTOVER.fullmatch(path.name) and ".removing-" in path.name:
            gone.append(path)
        elif path.name.endswith(SUFFIX) and _made_by_job(path):
            to = temporary_dir(path.with_name(path.name.removesuffix(SUFFIX)), "removing")
            with contextlib.suppress(OSError):  # what cannot be removed is in nobody's way
                path.rename(to)
                gone.append(to)
    if gone:
        threading.Thread(target=_remove, args=(gone,), name="megaresume-remove", daemon=True).start()


def remove_leftovers(root: Path) -> None:
    """Remove what killed conversions left. Only while the lock is held."""
    _remove([path for path in _listed(root) if _LEFTOVER.fullmatch(path.name)])


def _remove(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def _made_by_job(directory: Path) -> bool:
    try:
        fields = read_sealed(
            directory / SEAL, what="the seal", format_name=FORMAT, version=VERSION, error=CheckpointError
        )
    except Exception:  # noqa: BLE001  whatever it is, it is not known to be ours, and stays
        return False
    return fields.get("made_by") == "job"


def _listed(root: Path) -> list[Path]:
    try:
        return [root / name for name in sorted(os.listdir(root)) if SUFFIX in name]
    except OSError:
        return []
