"""The paths that Lightning saves to, as links to the file of a complete checkpoint, which they outlive."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaresume.checkpoint.choosing.search import Choice, ForeignCheckpoint
from megaresume.checkpoint.session.file_errors import writing
from megaresume.checkpoint.session.ranks import on_rank_0
from megaresume.checkpoint.session.session import Pick, Session
from megaresume.stream.errors import UsageError

#: in a tag directory: a file, or under DeepSpeed and with sharded checkpoints a directory.
FILE = "checkpoint.ckpt"


def exactly(session: Session, root: Path, path: Path) -> Pick:
    """The checkpoint that a path is of, or is a link to."""

    def pick(shared: Any, damaged: Any) -> Choice | ForeignCheckpoint | None:
        of_path = (file.parent for file in root.glob(f"*/{FILE}") if _same(file, path) or _same(file.parent, path))
        if (tag_dir := next(of_path, None)) is None:
            raise UsageError(
                "this is not a complete checkpoint of the run",
                found=str(path),
                expected=f"a directory in {root}, or the file in it, or a link to it",
                cause="it was saved in the middle of a step, copied, or written without megaresume; or the "
                "checkpoint that it was a link to is deleted (keep_last)",
                action="ckpt_path='last'; or read its weights alone, with YourModule.load_from_checkpoint",
            )
        return session.exactly(tag_dir)(shared, damaged)

    return pick


def _same(file: Path, path: Path) -> bool:
    """Whether the two are one file or directory, or directories whose first files are one."""
    try:
        if os.path.samefile(file, path):
            return True
        first, other = (next(iter(sorted(p for p in one.rglob("*") if p.is_file())), None) for one in (file, path))
        return first is not None and other is not None and os.path.samefile(first, other)
    except OSError:
        return False


def make_room(path: Any) -> None:
    """Lightning writes into a directory that is there, whose files may be links to those of a checkpoint."""
    on_rank_0(lambda: _remove(Path(path)) if os.path.isdir(path) else None)


def link(file: Path, paths: Sequence[Path]) -> None:
    """Let paths name the file of a checkpoint, so that it stays when the checkpoint is deleted."""
    for path in paths:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.new")
            _remove(new)
            if file.is_dir():
                shutil.copytree(file, new, copy_function=_link_file)
                _remove(path)  # a directory does not replace another
            else:
                _link_file(file, new)
            os.replace(new, path)


def _link_file(file: str | Path, new: str | Path) -> None:
    try:
        os.link(file, new)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, new)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
