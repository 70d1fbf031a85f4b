"""Rows of JSON lines, with the images that they name in a folder, as records; nothing is converted.

    chats.jsonl   {"image": "a/1.jpg", "conversations": [...]}      walk_rows  ->  Extent("byte 0", 0, 58), ...
    images/       a/1.jpg  a/2.jpg ...                         Folder.record  ->  members json, "a/1.jpg"

The row is the member ``json``; an image has the name that the row uses. The template decides what names images.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import posixpath
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from megaresume.data.inputs import COMPRESSIONS, join, resolved
from megaresume.data.read_ahead import Ahead
from megaresume.data.remote import is_url
from megaresume.data.row_lines import bounds_of
from megaresume.data.shard_files import SCAN_BLOCK, BlockFile, Place, RecordError, ShardFiles, local_path
from megaresume.data.streams import unpacked
from megaresume.data.tar import RecordExtent, check_plain
from megaresume.encoding.images.document import Record
from megaresume.stream.errors import CorpusError

if TYPE_CHECKING:
    from megaresume.data.record_index import ShardIndex
    from megaresume.encoding.images.pieces import Template

#: images read at a time while an index is made.
REQUESTS = 32
#: bytes of the longest row.
LONGEST = 1 << 28


def plain_lines(path: str, files: ShardFiles) -> tuple[str, int]:
    """A local file of these JSON lines, seekable, and its size in bytes: the file itself, or unpacked.

    Raises:
        CorpusError: it is missing, or damaged.
        SetupError: the store does not answer; no room to unpack it.
    """
    if is_url(path) or os.path.splitext(path)[1] in COMPRESSIONS:
        path = unpacked(path, files)
    return path, int(files.identity(path).partition(":")[0])


def folder_of(index: ShardIndex) -> str | None:
    """The directory or URL of the images that an index's rows name; None for an index of tar shards."""
    folder = index.header.get("folder")
    return None if folder is None else resolved(folder["path"], index.path)


def missing_folder(headline: str, found: str) -> CorpusError:
    """The error for a path that is not the folder of the images."""
    return CorpusError(
        headline,
        found=found,
        expected="the folder of the images that the rows name",
        cause="a wrong path, a folder above or below the right one, or a file system that is not mounted",
        action="check the path, or give the folder's location: image_folder in data.yaml, --image-folder of "
        "megaresume prepare",
    )


def walk_rows(
    file: BlockFile, path: str, start: int, stop: int, counted: Callable[[int], object] = lambda lines: None
) -> Iterator[RecordExtent]:
    """The rows of JSON lines that begin in bytes [start, stop) of the file; blank lines are skipped.

    Args:
        file: of the lines.
        path: for errors.
        start, stop: a piece of it.
        counted: called at the end with the number of lines.

    Raises:
        CorpusError: compressed, a list of JSON instead of lines, or a line that is too long.
    """
    lines = io.BufferedReader(file, SCAN_BLOCK)
    if start:  # a row that begins earlier belongs to another piece
        lines.seek(start - 1)
        start += len(lines.readline(stop - start + 1)) - 1
    else:
        _check_lines(file, path)
        lines.seek(0)
    number = 0
    for first, end, number in bounds_of(_lines_before(stop, lines, start, path), at=start, ends=b"\r\n"):
        if end > first:
            yield RecordExtent(f"byte {first}", first, end - first, line=number)
    counted(number)


def _lines_before(stop: int, lines: io.BufferedReader[BlockFile], at: int, path: str) -> Iterator[bytes]:
    """The lines from byte ``at`` on that begin before byte ``stop``."""
    while at < stop and (line := lines.readline(LONGEST + 1)):
        if len(line) > LONGEST:
            raise CorpusError(
                f"{path} has a row that is too long",
                found=f"more than {LONGEST} bytes from byte {at} on",
                expected="one row of JSON on each line",
                action="check that it is a file of JSON lines",
            )
        yield line
        at += len(line)


def _check_lines(file: BlockFile, path: str) -> None:
    check_plain(file, path, "JSON lines that are not compressed: rows are read by their offset")
    head = file.read_at(0, min(1 << 10, file.size)).removeprefix(codecs.BOM_UTF8).lstrip()
    if head.startswith(b"["):
        raise CorpusError(
            f"{path} is one list, not JSON lines",
            found="[ at its start",
            expected="one row, {...}, on each line",
            cause="a data set as LLaVA is published",
            action=f"write each row on a line: jq -c '.[]' {path} > NAME.jsonl",
        )


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Reads the images that rows name. Safe to share between threads, to fork and to pickle.

    Args:
        path: directory or URL.
        template: says which images a row names.
        files: reads them.
        image_bytes: of an image on average, for reading ahead.
    """

    path: str
    template: Template
    files: ShardFiles
    image_bytes: int = 1
    #: what `lines` found, by path.
    plain: dict[str, tuple[str, int]] = field(default_factory=dict)
    #: images "found" and "missing" so far.
    seen: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, index: ShardIndex, path: str | None, files: ShardFiles) -> Folder | None:
        """The folder of an index, or another one with the same images; None for an index of tar shards."""
        known = folder_of(index)
        if known is None:
            return None
        from megaresume.encoding.images.templates import template_from_options

        template = template_from_options(index.header["encoder"]["spec"]["template"])
        average = index.header["folder"]["bytes"] // max(index.header["images"], 1)
        return cls(path=path or known, template=template, files=files, image_bytes=average)

    def lines(self, path: str, size: int) -> tuple[str, int]:
        """Find the lines as `plain_lines` does, checking the size against the index; once per file.

        Raises:
            CorpusError: it has another size; or as `plain_lines`.
        """
        if path not in self.plain:
            self.files.check(path, size)
            self.plain[path] = plain_lines(path, self.files)
        return self.plain[path]

    def told(self, error: CorpusError, path: str, place: Place) -> CorpusError:
        """Add file and line to the error of a row."""
        words = {name: getattr(error, name) for name in ("found", "expected", "cause", "action")}
        return CorpusError(f"{path}:{self.files.line_at(place.path, place.offset)}: {error.headline}", **words)

    def check(self, others: Callable[[], Sequence[Place]] | None = None) -> None:
        """Refuse a missing folder, which no policy for records covers.

        Args:
            others: some images that once existed. They are looked for, once, if none was found so far.

        Raises:
            CorpusError: a local folder is missing, or images are missing and so are all the others.
            SetupError: the store does not answer.
        """
        if not is_url(self.path) and not os.path.isdir(local_path(self.path)):
            raise missing_folder(f"{self.path} is missing", "no such directory")
        if others is not None and not self.seen["found"]:
            places = others()
            if places and not any(map(_is_there, places)):
                found = f"none of {len(places)} images of rows all over the index, such as {places[0].path}"
                raise missing_folder(f"{self.path} has none of the images that the rows name", found)
            self.seen["found"] += 1

    def record(
        self, data: bytes, place: Place, *, again: bool = False, others: Callable[[], Sequence[Place]] | None = None
    ) -> Record:
        """The record of a row.

        Args:
            data: the line, without its end.
            place: where it lies.
            again: read images again, past the cache.
            others: as of `check`.

        Raises:
            RecordError: no JSON, or an image that it names cannot be read. Its words are the same wherever they lie.
            CorpusError: the folder is missing, or another one.
            SetupError: the store does not answer.
        """
        row, names = self._row(data, place)
        members: dict[str, bytes] = {}
        for name in names:
            try:
                members[name] = members[name] if name in members else self.files.fetch(self._image(name), again=again)
                self.seen["found"] += 1
            except RecordError as error:
                self.seen["missing"] += 1
                self.check(others)
                if not self.template.missing_images:
                    raise RecordError(
                        f"record '{row.key}' has no image '{name}'",
                        expected="a file below the folder of images",
                        cause=f"an image that was not downloaded, was renamed or deleted ({error.found})",
                        action=f"put it there: {self._image(name).path}",
                    ) from error
        members["json"] = data
        return Record(key=row.key, path=place.path, members=members, images=names)

    def places(self, data: bytes, place: Place) -> list[Place]:
        """Where the images of a row are; none for a row that cannot be read."""
        try:
            return [self._image(name) for name in dict.fromkeys(self._row(data, place)[1])]
        except CorpusError:
            return []

    def with_images(self, rows: Iterator[RecordExtent], file: BlockFile) -> Iterator[RecordExtent]:
        """Rows of a file as they come; of a store, the images of the next ones are on their way."""
        if not is_url(self.path):
            yield from rows
            return
        waiting: deque[tuple[RecordExtent, list[Place]]] = deque()
        with closing(Ahead(REQUESTS)) as ahead:
            while True:
                while ahead.held < 2 * REQUESTS * self.image_bytes and (row := next(rows, None)) is not None:
                    data = file.read_at(row.offset, row.nbytes)
                    places = self.places(data, Place(self.files, "", 0, row.offset, row.nbytes))
                    ahead.want(places)
                    waiting.append((row, places))
                if not waiting:
                    return
                row, places = waiting.popleft()
                yield row
                ahead.release(places)

    def _image(self, name: str) -> Place:
        path = posixpath.normpath(name)
        if self.path.startswith(("http://", "https://")):  # there # and ? mean something
            path = quote(path)
        return Place(self.files, join(self.path, path), 0, 0, self.image_bytes, whole=True)

    def _row(self, data: bytes, place: Place) -> tuple[Record, tuple[str, ...]]:
        record = Record(key=f"byte {place.offset}", path=place.path, members={"json": data})
        try:
            row = json.loads(data, object_pairs_hook=_unique)
            if not isinstance(row, dict):
                raise ValueError(f"{type(row).__name__}, not an object")
        except (ValueError, RecursionError) as error:
            raise RecordError(
                f"record '{record.key}' is not a row of JSON",
                found=f"{data[:40]!r}{' ...' if len(data) > 40 else ''}: {error}",
                expected='one object on the line, {"image": ...}',
                cause="a damaged file, one that was written again, or an object on several lines",
                action="correct the line",
            ) from error
        try:
            names = self.template.image_names(row)
        except ValueError as error:
            raise RecordError(
                f"record '{record.key}' names its images in two ways",
                found=str(error),
                expected="the same images under each of these keys, or one key",
                action="write all images of the row under 'images', in order",
            ) from error
        return record, tuple(_checked(record, name) for name in names)


def _is_there(place: Place) -> bool:
    try:
        place.files.read_whole(place.path)
    except RecordError:
        return False
    return True


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return row


def _checked(record: Record, name: object) -> str:
    """A name that stays in the folder."""
    if isinstance(name, str) and _is_path(name):
        return name
    raise RecordError(
        f"record '{record.key}' names an image that is not in the folder",
        found=f"{name!r:.80}",
        expected="a path relative to the folder of images, without '..'",
        cause="an absolute path, an address, or the image itself, in the row",
        action="write names below one folder into the rows, and name that folder",
    )


def _is_path(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    if name.startswith(("/", "data:")) or "://" in name or "\0" in name:
        return False
    # The row is the member json.
    return bool(name.strip("./")) and name != "json" and ".." not in name.split("/")
