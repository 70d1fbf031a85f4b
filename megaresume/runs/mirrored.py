"""Mirrors a run in an object store for commands that read a directory: its records, and placeholders for other files.

Commands print the URL instead of the directory. Only reads, without write permission or lease.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from megaresume.checkpoint.records.manifest import FileEntry, read_manifest
from megaresume.checkpoint.records.names import STAND_INS, manifest_path, records_dir, tag_iteration
from megaresume.checkpoint.store.lease import Head
from megaresume.checkpoint.store.mirror import Mirror, by_name, file_name, record_name
from megaresume.checkpoint.store.scratch import Scratch
from megaresume.checkpoint.store.store import Store
from megaresume.render import STANDS_FOR, in_place
from megaresume.stream.errors import CheckpointError, UsageError

#: the commands whose directory may be a URL.
_FROM_STORE = frozenset({"latest", "inspect", "verify", "trace", "plan", "doctor", "report", "top"})
#: The flags that commands get with a URL if not given: the mirror shows one moment, and is deleted after the command.
_DEFAULTS = {"top": ("--once",), "report": ("--output", "report.html")}
#: Commands that need the run on disk: they, or a program that they start, read the weights.
_ON_DISK = frozenset({"convert", "replay"})
_URL = re.compile(r"(?!https?:|file:)[a-z][a-z0-9+.-]*://.+")


def url_in(words: Sequence[str]) -> int | None:
    """The index of the word of a command line that is a run's URL; None if there is none."""
    return next((number for number, word in enumerate(words) if _URL.fullmatch(word)), None)


def defaults(command: str, words: Sequence[str]) -> tuple[str, ...]:
    """The flags to add to a command line with the URL of a run."""
    added = _DEFAULTS.get(command, ())
    return () if not added or any(word.split("=")[0] == added[0] for word in words) else added


def check_command(command: str, url: str) -> bool:
    """Whether a command can be given a run's URL; False: it handles URLs itself.

    Raises:
        UsageError: it needs the files on disk.
    """
    if command in _ON_DISK:
        raise UsageError(
            f"megaresume {command} needs the files of a run on a disk",
            found=url,
            expected="a directory",
            action="resume the run on this machine, or copy a checkpoint here: docs/object-store.md, What lies where",
        )
    return command in _FROM_STORE


class Renamed:
    """A stream that writes another name instead of a directory's, as the directory stands for it: see `in_place`.

    Args:
        out: the stream to write to.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        """Write, with the name replaced."""
        self._out.write(in_place(text))
        return len(text)

    def flush(self) -> None:
        """Flush it."""
        self._out.flush()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._out.isatty()

    def fileno(self) -> int:
        """The file descriptor."""
        return self._out.fileno()

    @property
    def encoding(self) -> str:
        """The encoding of the text."""
        return self._out.encoding


@contextlib.contextmanager
def mirrored(url: str, *, whole: bool = False, ranks: bool = False) -> Iterator[str]:
    """A temporary directory with what a command needs of a run in a store.

    Args:
        url: ``s3://bucket/run``, or a tag directory in it.
        whole: download all files completely, to compare checksums: takes as much space as they do.
        ranks: download the files that each rank added completely.

    Raises:
        UsageError: the URL has no run.
        SetupError: the store does not answer, or refuses.
    """
    root_url, _, last = url.rstrip("/").rpartition("/")
    is_tag = tag_iteration(last) is not None
    store = Store(root_url if is_tag else url)
    with Scratch() as root:
        directory = str(root)
        mirror = Mirror(store, root)
        head = mirror.refresh()
        if not mirror.sizes:
            raise UsageError(
                "there is nothing in this place of the store",
                found=store.url,
                expected="the stage_to of a run, or a directory of checkpoints that was copied there",
                action="check the URL",
            )
        if whole and head is None:
            raise UsageError(
                "checksums cannot be compared there",
                found=f"{mirror.store}: no checkpoint that stage_to has copied",
                expected="copies of stage_to",
                action="copy the directory here, and inspect it with --checksums",
            )
        if head is not None and (whole or ranks):
            _fill(mirror, head, whole=whole)
        out: Any = Renamed(sys.stdout)
        error: Any = Renamed(sys.stderr)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), by_name(root, store.url):
            STANDS_FOR[directory] = store.url
            try:
                yield str(root / last if is_tag else root)
            except OSError as refused:
                if refused.filename is not None:  # not set if the disk is full
                    refused.filename = in_place(str(refused.filename))
                raise
            finally:
                del STANDS_FOR[directory]


def _fill(mirror: Mirror, head: Head, *, whole: bool) -> None:
    """Download the files of ranks of complete checkpoints, or all files, as the store returns them, without checks."""
    for saved in head.saves:
        manifest = read_manifest(manifest_path(mirror.root, saved.iteration, saved.tag))
        files = manifest.files if whole else ()
        places = [(mirror.root / saved.tag / e.path, file_name(saved.tag, saved.save_id, e.path), e) for e in files]
        places += [(records_dir(mirror.root) / e.path, record_name(saved.save_id, e.path), e) for e in manifest.beside]
        wanted = []
        for path, name, entry in places:
            if mirror.sizes.get(name) == entry.size:
                path.unlink(missing_ok=True)
                wanted.append((name, path, FileEntry(path=entry.path, size=entry.size)))
        with contextlib.suppress(CheckpointError):
            mirror.store.download_all(wanted, lambda: None)
    (mirror.root / STAND_INS).unlink()
