"""Plain tar archives as webdataset writes them: members grouped into records, read back by a byte range.

    shard.tar   a/000.jpg  a/000.txt | a/001.jpg  a/001.json | ... | two blocks of zeros
    walk    ->  Extent("a/000", 0, 13824), Extent("a/001", 13824, 9216), ...     when the index is made
    record  <-  the bytes of one extent                                         when a sample is read

A record is consecutive members with the same path up to the first dot of the base name; the extension, in lower case,
names the kind of a member. `tarfile` stops silently at a damaged header, and at the first end marker of two
concatenated archives: both are refused here.

This module parses ordinary headers, and leaves all others to `tarfile`. Nearly every member is ordinary: a file with a
name that fits. These are read ten times faster than by `tarfile`, which gets long names, extended headers, links and
anything damaged.

Source of the layout: POSIX.1-2001, ustar interchange format.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import xxhash

from megaresume.data.shard_files import BlockFile, RecordError
from megaresume.encoding.images.document import Record
from megaresume.stream.errors import CorpusError

BLOCK = tarfile.BLOCKSIZE
_POSIX, _GNU = b"ustar\x0000", b"ustar  \x00"


@dataclass(slots=True)
class Header:
    """The header of one member."""

    name: str
    #: bytes of its content.
    size: int
    #: bytes from the start of the archive to its (first) header, to its content, and to the next header.
    offset: int
    data: int
    stop: int
    #: what `tarfile` read; None for an ordinary header.
    info: tarfile.TarInfo | None = None


def headers(file: BlockFile) -> Iterator[Header | int]:
    """Every member, in order; finally the offset after the last one, where no header follows.

    Raises:
        tarfile.TarError: a damaged header; a member that extends past the end of the file.
    """
    offset = 0
    while True:
        block = file.read_at(offset, max(min(BLOCK, file.size - offset), 0))
        header = _ordinary(block, offset)
        if header is None:
            if not any(block):
                yield offset
                return
            header = _other(file, offset)
        if header.data + header.size > file.size:
            raise tarfile.ReadError(f"{header.name} continues after the end: unexpected end of data")
        yield header
        offset = header.stop


def _ordinary(block: bytes, offset: int) -> Header | None:
    if len(block) < BLOCK or block[156:157] != tarfile.REGTYPE or block[257:265] not in (_POSIX, _GNU):
        return None
    prefix = block[345:500].partition(b"\0")[0]
    if prefix and block[257:265] == _GNU:  # has other fields there
        return None
    try:
        size = int(block[124:136].rstrip(b"\0 "), 8)
        checksum = int(block[148:156].partition(b"\0")[0], 8)
    except ValueError:
        return None
    if sum(block) - sum(block[148:156]) + 8 * ord(" ") != checksum:
        return None
    name = block[:100].partition(b"\0")[0]
    if prefix:
        name = prefix + b"/" + name
    data = offset + BLOCK
    stop = data + -(-size // BLOCK) * BLOCK
    return Header(name.decode("utf-8", "surrogateescape"), size, offset, data, stop)


def _other(file: BlockFile, offset: int) -> Header:
    file.seek(offset)
    with tarfile.open(fileobj=file, mode="r:") as archive:
        info = archive.firstmember  # type: ignore[attr-defined]
        stop = archive.offset
    if info is None:
        raise tarfile.ReadError(f"no header of a member at byte {offset}")
    return Header(info.name, info.size, offset, info.offset_data, stop, info)


_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
#: webdataset and Energon skip these names at the top of an archive.
_META = re.compile(r"__[^/]*__(?:$|/)")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(slots=True)
class RecordExtent:
    """The place of a record in its shard."""

    key: str
    #: bytes from the start of the shard to the header of the first member.
    offset: int
    #: bytes up to the end of the last member, including its padding.
    nbytes: int
    #: number of members.
    members: int = field(default=1)
    #: for a row of JSON lines: its line, from 1.
    line: int = 0


def walk(file: BlockFile, shard: str, ignored: Callable[[str], object] = lambda name: None) -> Iterator[RecordExtent]:
    """Every record of an archive, in order; reads only headers.

    Args:
        file: of the archive.
        shard: its name, for errors.
        ignored: called with the name of every file outside records (without an extension, or ``__meta__``).

    Raises:
        CorpusError: not a plain tar; truncated, damaged or empty; a member whose path leaves it, or that is not a file.
    """
    check_plain(file, shard, "a plain .tar: records are read by their offset")
    current: RecordExtent | None = None
    #: the extensions of each key; nearly all records have the same ones.
    seen: dict[str, tuple[str, ...]] = {}
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    for header in _members(file, shard):
        found = _NAME.fullmatch(header.name)
        _check_name(header.name, shard)
        if found is None or _META.match(header.name):
            ignored(header.name)
            continue
        extension = found[2].lower()
        if current is not None and current.key == found[1]:
            current.nbytes = header.stop - current.offset
            current.members += 1
            extensions = (*seen[found[1]], extension)
            seen[found[1]] = known.setdefault(extensions, extensions)
            continue
        # A whole record may come twice; one whose members are not adjacent would become several.
        if extension not in seen.get(found[1], (extension,)):
            raise _not_grouped(shard, header.name, found[1], seen[found[1]])
        seen[found[1]] = known.setdefault((extension,), (extension,))
        if current is not None:
            yield current
        current = RecordExtent(found[1], header.offset, header.stop - header.offset)
    if current is None:
        raise CorpusError(
            f"{shard} has no record",
            found=f"{file.size} bytes without a file that has an extension",
            expected="members such as 000.jpg and 000.txt",
            cause="an empty shard, or members without extensions",
            action="remove the shard from the list, or write it again",
        )
    yield current


def parse_record(data: bytes, path: str) -> Record:
    """A record from the bytes of its extent.

    Args:
        data: the bytes.
        path: of the shard.

    Raises:
        RecordError: they are not the members of one record. The text does not depend on the shard's path.
    """
    shard = path.rpartition("/")[2]
    key: str | None = None
    members: dict[str, bytes] = {}
    end = 0
    try:
        for header in headers(BlockFile(lambda offset, nbytes: data[offset : offset + nbytes], len(data), len(data))):
            if isinstance(header, int):
                end = header
                break
            if header.info is not None and header.info.isdir():
                continue
            _check_member(header, shard)
            found = _NAME.fullmatch(header.name)
            if found is None:
                continue
            extension = found[2].lower()
            if (key is not None and found[1] != key) or extension in members:
                raise RecordError(
                    f"a record of {shard} does not hold together",
                    found=f"{header.name} after {key}.{', '.join(members)}",
                    expected="members of one key with different extensions",
                    cause="two members of one name, or a shard that was written again after the index was made",
                    action="correct the shard, then make the index again: megaresume prepare --overwrite",
                )
            key = found[1]
            members[extension] = data[header.data : header.data + header.size]
    except tarfile.TarError as error:
        raise _not_there(shard, str(error)) from error
    if key is None or end < len(data):
        raise _not_there(shard, "no header of a file" if key is None else f"a damaged header after {key}")
    return Record(key=key, path=path, members=members)


def content_hash(record: Record) -> int:
    """32 bits of key, extensions and contents: independent of the record's place and of the tar's details."""
    hasher = xxhash.xxh3_64(record.key.encode("utf-8", "surrogateescape"))
    for extension, content in record.members.items():
        hasher.update(f"|{len(extension)}|{len(content)}|{extension}".encode("utf-8", "surrogateescape"))
        hasher.update(content)
    return hasher.intdigest() & 0xFFFFFFFF


def _members(file: BlockFile, shard: str) -> Iterator[Header]:
    """The members that are regular files."""
    try:
        for header in headers(file):
            if isinstance(header, int):
                _check_end(file, shard, header)
                return
            if header.info is not None and header.info.isdir():
                continue
            _check_member(header, shard)
            yield header
    except tarfile.TarError as error:
        raise _damaged(shard, file.size, str(error)) from error


def _not_grouped(shard: str, name: str, key: str, extensions: tuple[str, ...]) -> CorpusError:
    return CorpusError(
        f"{shard} has a key that comes again: '{key}'",
        found=f"{name}, after other records than {key}.{', '.join(extensions)}",
        expected="members of one key one after the other: they are one record",
        cause="an archive in the order of a directory, or with all images before all texts",
        action="write it again in the order of the names: mkdir DIR; tar -xf SHARD -C DIR; "
        "tar --sort=name -cf SORTED -C DIR .",
    )


def check_plain(file: BlockFile, shard: str, expected: str) -> None:
    """Raises CorpusError: a compressed file, by its first bytes; ``expected`` is the reason in the error."""
    head = file.read_at(0, min(8, file.size))
    kind = next((name for magic, name in _COMPRESSED.items() if head.startswith(magic)), None)
    if kind is not None:
        raise CorpusError(
            f"{shard} is compressed",
            found=f"a {kind} file",
            expected=expected,
            cause="images are compressed already: compressing the shard saves next to nothing",
            action=f"decompress it, for example: {'gunzip' if kind == 'gzip' else kind + ' -d'} FILE",
        )


def _check_name(name: str, shard: str) -> None:
    if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
        raise CorpusError(
            f"{shard} has a member whose name is not UTF-8",
            found=ascii(name),
            expected="names in UTF-8",
            cause="an archive that was written with the names of an old file system (Latin-1 and the like)",
            action="write the shard again with other names: the key of a record is reported, and may be named in JSON",
        )


def _check_member(header: Header, shard: str) -> None:
    name, info = header.name, header.info
    if name.startswith("/") or ".." in name.split("/"):
        raise CorpusError(
            f"{shard} has a member that points outside it",
            found=repr(name),
            expected="relative names without '..'",
            cause="an archive that was not made for training, or that was made to overwrite files",
            action="write the shard again with relative names, and ask where it came from",
        )
    if info is not None and (not info.isreg() or info.issparse()):
        kind = "a link" if info.islnk() or info.issym() else "a sparse file" if info.issparse() else "no file"
        raise CorpusError(
            f"{shard} has a member that is {kind}",
            found=f"{name!r}, type {info.type!r}" + (f" to {info.linkname!r}" if info.linkname else ""),
            expected="ordinary files",
            cause="an archive of a directory that holds links, devices or the like",
            action="write the shard again with the files themselves (tar --dereference --hard-dereference)",
        )


def _check_end(file: BlockFile, shard: str, offset: int) -> None:
    if offset >= file.size:
        raise _damaged(shard, file.size, f"no end marker: the last member ends with the file at byte {offset}")
    while offset < file.size:
        chunk = file.read_at(offset, min(1 << 20, file.size - offset))
        if any(chunk):
            raise CorpusError(
                f"{shard} continues after its end marker",
                found=f"{file.size - offset} bytes from byte {offset} on that are not all zero",
                expected="the end of the file",
                cause="two archives that were put together with cat: readers of tar stop after the first",
                action="give them as two shards, or join them with tar --concatenate",
            )
        offset += len(chunk)


def _damaged(shard: str, size: int, found: str) -> CorpusError:
    return CorpusError(
        f"{shard} is not a whole tar archive",
        found=f"{found} ({size} bytes in all)",
        expected="members one after the other, and two blocks of zeros at the end",
        cause="an interrupted copy or writer, or a file of another kind",
        action="copy or write the shard again",
    )


def _not_there(shard: str, found: str) -> RecordError:
    return RecordError(
        f"a record of {shard} is not where the index says",
        found=found,
        expected="the members of the record",
        cause="a damaged disk, or a shard that was written again with the same size",
        action="copy the shard again, or make the index again: megaresume prepare --overwrite",
    )
