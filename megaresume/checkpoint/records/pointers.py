"""The two pointer files, which name a checkpoint, for us and for any other program that reads the directory.

    latest                                  DeepSpeed's: the name of a tag directory
    latest_checkpointed_iteration.txt       Megatron's, the tracker: an iteration, or the word ``release``

DeepSpeed writes its pointer before the other ranks are done, and both programs write in place, so that a kill leaves an
empty file. So reading is tolerant: it returns what is there and what is wrong with it, and never raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megaresume.checkpoint.records.names import LATEST, TRACKER, check_tag, tag_iteration, usual_tags
from megaresume.files import open_file
from megaresume.stream.errors import UsageError

PointerName = Literal["latest", "latest_checkpointed_iteration.txt"]

#: bytes; a pointer has one short name, anything longer is garbage.
_MAX_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Pointer:
    """The content of a pointer file."""

    name: PointerName
    status: Literal["ok", "absent", "empty", "garbled", "release", "dangling", "unreadable"]
    #: the content of the file, shortened for display; None if there is no file.
    text: str | None = None
    #: the tag that it names: an existing directory if ``status`` is ok or release.
    tag: str | None = None
    #: the iteration that it names, if known without opening anything.
    iteration: int | None = None

    @property
    def problem(self) -> str | None:
        """What is wrong, as a sentence; None for a pointer that is absent, ok, or ``release``."""
        match self.status:
            case "empty":
                return f"{self.name} is empty (a writer was killed, or the disk was full)"
            case "garbled":
                wanted = "a tag" if self.name == LATEST else "an iteration or 'release'"
                return f"{self.name} holds {self.text!r}, not {wanted}"
            case "dangling":
                return f"{self.name} names {self.text!r}, but there is no such checkpoint directory"
            case "unreadable":
                return f"{self.name} cannot be read: {self.text}"
            case _:
                return None


def read_pointer(root: Path, name: PointerName) -> Pointer:
    """Read one pointer and check whether the directory that it names exists. Never raises."""
    try:
        with open_file(root / name) as file:
            data = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return Pointer(name=name, status="absent")
    except OSError as error:
        return Pointer(name=name, status="unreadable", text=error.strerror or str(error))
    text = data.decode("utf-8", "backslashreplace").strip()
    shown = text if len(text) <= 80 else text[:77] + "..."
    if not text:
        return Pointer(name=name, status="empty", text="")
    if name == LATEST:
        return _read_latest(root, text, shown)
    return _read_tracker(root, text, shown)


def _read_latest(root: Path, text: str, shown: str) -> Pointer:
    try:
        check_tag(text)
    except UsageError:
        return Pointer(name=LATEST, status="garbled", text=shown)
    there = (root / text).is_dir()
    return Pointer(
        name=LATEST, status="ok" if there else "dangling", text=shown, tag=text, iteration=tag_iteration(text)
    )


def _read_tracker(root: Path, text: str, shown: str) -> Pointer:
    if text == "release":
        there = (root / text).is_dir()
        return Pointer(name=TRACKER, status="release" if there else "dangling", text=shown, tag=text)
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        return Pointer(name=TRACKER, status="garbled", text=shown)
    iteration = int(text)
    tag = next((tag for tag in usual_tags(iteration) if (root / tag).is_dir()), None)
    # The iteration may belong to a custom tag: `resolve_pointer` finds out whether it dangles.
    return Pointer(
        name=TRACKER, status="ok" if tag is not None else "dangling", text=shown, tag=tag, iteration=iteration
    )


def read_pointers(root: Path) -> tuple[Pointer, Pointer]:
    """Read ``latest`` and the tracker."""
    return read_pointer(root, LATEST), read_pointer(root, TRACKER)
