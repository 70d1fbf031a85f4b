"""``PREFIX.prepare/``: what is finished of a prepare, so that a rerun after a kill goes on there.

    plan.json           the input files and the settings; another plan is refused
    lock                held while a prepare runs
    part-00000000       one finished block: a line of JSON, then int32[documents] lengths, then the tokens

A part appears by rename, when it is complete, and says what it contains with a hash. It holds the position in the input
where the next block starts, so that finished blocks need not be read again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.encoding.blocks import Position
from megaresume.sources.sidecar import write_json_atomically
from megaresume.stream.errors import CorpusError, SetupError, UsageError

__all__ = ["Part", "PartFiles"]

FORMAT = "megaresume.prepare"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One finished block."""

    documents: int
    tokens: int
    #: documents without a token, left out.
    empty: int
    #: documents that are not UTF-8, left out.
    skipped: int
    #: of the documents, UTF-8 bytes.
    text_bytes: int
    #: read for it from disk (about).
    raw_bytes: int
    #: where the next block starts.
    end: Position
    #: bytes of a token.
    token_bytes: int
    #: xxh3_64 of lengths and tokens, 16 hex digits.
    hash: str


class PartFiles:
    """The directory of one prepare.

    Args:
        prefix: of the corpus to be.
    """

    def __init__(self, prefix: Path) -> None:
        self.directory = prefix.with_name(prefix.name + ".prepare")

    @contextmanager
    def locked(self, plan: Mapping[str, Any], *, restart: bool) -> Iterator[None]:
        """Hold the directory: new, or left by a killed run of the same plan.

        Args:
            plan: input files and settings, plain JSON.
            restart: throw away what another run left.

        Raises:
            SetupError: another prepare is running there.
            UsageError: what is there belongs to another plan.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with open(self.directory / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise SetupError(
                        f"another prepare is working on {self.directory.with_suffix('')}",
                        found=f"{self.directory / 'lock'} is locked",
                        expected="one prepare at a time",
                        action="wait for it, or give this one another --output",
                    ) from error
                # Some network file systems have no locks: then it is up to the user.
            if restart:
                for path in self.directory.iterdir():
                    if path.name != "lock":
                        path.unlink()
            self._check_plan({"format": FORMAT, "version": VERSION, **plan})
            yield

    def _check_plan(self, plan: dict[str, Any]) -> None:
        plan = json.loads(json.dumps(plan))
        path = self.directory / "plan.json"
        try:
            old = json.loads(path.read_bytes())
        except FileNotFoundError:
            write_json_atomically(path, plan)
            return
        except ValueError:
            old = None
        if old == plan:
            return
        # What was finished under "error" holds no invalid text: a milder policy changes nothing in it.
        if isinstance(old, dict) and old.get("invalid") == "error" and old | {"invalid": plan["invalid"]} == plan:
            write_json_atomically(path, plan)
            return
        raise UsageError(
            f"{self.directory} was left by a prepare of other input or with other settings",
            found="; ".join(_differences(old, plan)) if isinstance(old, dict) else "an unreadable plan.json",
            expected="the same input files and settings, to go on where that run stopped",
            action="repeat the earlier command to go on, or add --restart to throw its work away",
        )

    def path(self, index: int) -> Path:
        """Where part `index` is when it is finished."""
        return self.directory / f"part-{index:08d}"

    def write(self, index: int, lengths: npt.NDArray[np.int32], tokens: npt.NDArray[Any], **counts: Any) -> Part:
        """Write a part: all of it or nothing.

        Args:
            index: number of the block.
            lengths: tokens of each document, int32[documents].
            tokens: of all documents, in the type of the corpus.
            counts: the other fields of `Part`.

        Raises:
            OSError: it cannot be written.
        """
        hasher = xxhash.xxh3_64(lengths.data)
        hasher.update(tokens.data)
        part = Part(
            documents=len(lengths),
            tokens=len(tokens),
            token_bytes=tokens.dtype.itemsize,
            hash=hasher.hexdigest(),
            **counts,
        )
        temporary = self.directory / f".part-{index:08d}.{os.getpid()}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(json.dumps(asdict(part)).encode() + b"\n")
                file.write(lengths.data)
                file.write(tokens.data)
            os.replace(temporary, self.path(index))
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        return part

    def find(self, index: int) -> Part | None:
        """Part `index` if it is finished; a damaged one is removed."""
        path = self.path(index)
        try:
            with open(path, "rb") as file:
                head = file.readline(1 << 16)
                size = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return None
        try:
            fields = json.loads(head)
            part = Part(**(fields | {"end": Position(**fields["end"])}))
            if size == len(head) + 4 * part.documents + part.token_bytes * part.tokens:
                return part
        except (ValueError, TypeError, KeyError):
            pass
        path.unlink()
        return None

    def read(self, index: int) -> tuple[npt.NDArray[np.int32], bytes]:
        """Lengths and tokens of a finished part.

        Raises:
            CorpusError: it is damaged; it is removed, so that a rerun makes it again.
        """
        path = self.path(index)
        data = path.read_bytes()
        head, _, body = data.partition(b"\n")
        try:
            fields = json.loads(head)
        except ValueError:
            fields = {"hash": "a line of JSON"}
        if xxhash.xxh3_64_hexdigest(body) != fields["hash"]:
            path.unlink()
            raise CorpusError(
                f"{path} is damaged",
                found="another hash than when it was written",
                expected=fields["hash"],
                cause="a damaged disk, or a machine that lost power",
                action="run the same command again: this part is made again, the others are kept",
            )
        split = 4 * fields["documents"]
        return np.frombuffer(body, "<i4", fields["documents"]), body[split:]

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.directory)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """At most a few, in words."""
    keys = sorted({*old, *new} - {"inputs"})
    found = [f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]
    before = {f["path"]: f for f in old.get("inputs", [])}
    after = {f["path"]: f for f in new.get("inputs", [])}
    if list(before) != list(after):
        gone, added = [p for p in before if p not in after], [p for p in after if p not in before]
        found += [f"{p} is gone" for p in gone[:3]] + [f"{p} is new" for p in added[:3]]
        found += [] if gone or added else ["the files are in another order"]
    found += [f"{p} changed" for p in [p for p in after if p in before and before[p] != after[p]][:3]]
    return found
