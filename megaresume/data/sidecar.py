"""Files beside a corpus: whether they are still those that were opened, and caches of what takes long to compute.

Also maps files, and replaces them atomically. ``<prefix>.megaresume.json``, and lists of long documents:

    {"format": "megaresume.corpus", "version": 1,
     "tokenizer": {"fingerprint": ..., "vocabulary": ..., "name": ..., "vocab_size": ..., "eod": ...,
                   "append_eod": ..., "idx_bytes": ..., "bin_bytes": ..., "spans_bytes": ... or null,
                   "spans_hash": "16 hex digits" or null} or null,
     "fingerprints": [{"idx": {"size": ..., "mtime_ns": ..., "ctime_ns": ..., "inode": ...}, "bin": {...},
                       "spans": {...} or null, "range": [start, stop], "documents": ..., "tokens": ...,
                       "lengths": "32 hex digits", "contents": "16 hex digits", "trained": "16 hex digits" or null}]}

``fingerprints`` is a cache: hashing the lengths of 10^9 documents takes a minute, and a resume must not wait for it.
An entry is valid while the .idx, the .bin and the .spans have the same size, times of change and inode. The time when
an inode changed (ctime) cannot be set back: it reveals a file written in place even if its mtime is restored, as
``rsync --inplace --times`` and ``cp --preserve`` do. ``tokenizer`` was written by ``megaresume prepare``; it is valid
for files of those sizes, so that it survives a copy, but not a rebuild by another program. If the corpus's directory
cannot be written to, the cache goes to ``$MEGARESUME_CACHE`` or the XDG cache directory.

Raise `VERSION` when a reader of the old version would misread the new one; older versions of the cache may be ignored.

``<prefix>.megaresume.<piece>.pieces``: the documents of a large corpus that are longer than a piece. Finding them takes
seconds for 10^9 documents, and a resume must not wait for it; so the list is saved and mapped into memory, and only
what is looked up is read: with the guide, a page or two for a piece. Little-endian int64:

    magic, version, .idx: size, time of change, inode; piece, k, later pieces in all
    int64[k // STRIDE] the guide: every STRIDE-th entry of the last list
    int64[k] documents, ascending;  int64[k] later pieces up to and with each
    xxh3_64 of all that

It is valid while the .idx is unchanged, and goes to the cache directory if the corpus's cannot be written to. A damaged
one is rebuilt: with wrong numbers, pieces would be trained never or twice.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from megaresume.data.layout import idx_path
from megaresume.data.spans import spans_path
from megaresume.files import open_file, read_file, written_atomically
from megaresume.stream.errors import CorpusError, SetupError, parse_json
from megaresume.stream.progress import progress
from megaresume.stream.source import STRIDE, LengthSource, LongDocuments, find_long
from megaresume.stream.state import Fingerprint


@dataclass(frozen=True, kw_only=True, slots=True)
class FileIdentity:
    """The identity of a file, as far as the file system can tell without reading it."""

    #: bytes of the file.
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileIdentity:
        """The identity in the result of `os.stat` or `os.fstat`."""
        return cls(size=stat.st_size, mtime_ns=stat.st_mtime_ns, ctime_ns=stat.st_ctime_ns, inode=stat.st_ino)

    def is_the_file(self, other: FileIdentity) -> bool:
        """Whether a run may continue with it: a touch, a chmod or a hard link must not stop one."""
        return (self.size, self.inode) == (other.size, other.inode)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusIdentity:
    """The identities of a corpus's files."""

    idx: FileIdentity
    #: the .bin, or the file in place of it.
    bin: FileIdentity
    #: the file of spans; None if the corpus has none.
    spans: FileIdentity | None = None

    @classmethod
    def of(cls, prefix: Path, tokens: str = ".bin") -> CorpusIdentity:
        """The identities of a corpus's files now.

        Args:
            prefix: of the corpus.
            tokens: suffix of the file that determines the tokens.

        Raises:
            OSError: a file cannot be looked at.
        """
        spans = None
        with contextlib.suppress(FileNotFoundError):
            spans = FileIdentity.of(spans_path(prefix).stat())
        bin_ = prefix.with_name(prefix.name + tokens)
        return cls(idx=FileIdentity.of(idx_path(prefix).stat()), bin=FileIdentity.of(bin_.stat()), spans=spans)


def map_file(path: Path) -> tuple[mmap.mmap | bytes, FileIdentity]:
    """Map a file read-only; an empty one, which cannot be mapped, is empty bytes."""
    with opened_file(path) as file:
        stat = os.fstat(file.fileno())
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if stat.st_size else b""
    return data, FileIdentity.of(stat)


@contextlib.contextmanager
def opened_file(path: Path) -> Iterator[FileIO]:
    """Open a file to read or to map; errors are worded for people."""
    try:
        with open_file(path) as file:
            yield file
    except FileNotFoundError as error:
        raise changed(path) from error
    except OSError as error:
        many = error.errno in (errno.EMFILE, errno.ENFILE)
        raise SetupError(
            f"{path} cannot be opened",
            found=error.strerror,
            expected="a file that can be read and memory-mapped",
            cause="every source holds two files open" if many else "permissions, or a file system without memory maps",
            action="raise the limit, as root: ulimit -Hn 65536" if many else f"check: ls -l {path}",
        ) from error


def changed(path: Path, now: FileIdentity | None = None, opened: FileIdentity | None = None) -> CorpusError:
    """The error for a file that is not the one that was opened."""
    found = "no such file, or another one"
    if now is not None and opened is not None:
        found = f"{now.size} bytes" if now.size != opened.size else "a file of the same size that was written since"
    return CorpusError(
        f"{path} changed after the corpus was opened",
        found=found,
        expected="the same file" if opened is None else f"the same file of {opened.size} bytes, untouched",
        cause="the corpus is being rebuilt, copied or removed",
        action="wait until that is done and start again",
    )


def cache_directory() -> Path | None:
    """The cache directory of this user; None without a home directory."""
    if base := os.environ.get("MEGARESUME_CACHE"):
        return Path(base)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "megaresume"
    try:
        return Path.home() / ".cache" / "megaresume"
    except RuntimeError:  # in a container, the user id may not exist
        return None


def write_json_atomically(path: Path, data: object) -> None:
    """Replace a file, see `written_atomically`. Raises OSError."""
    with written_atomically(path) as file:
        file.write(f"{json.dumps(data, indent=1)}\n".encode())


FORMAT = "megaresume.corpus"
VERSION = 1
#: most entries kept: train, valid and test of a few splits.
MAX_FINGERPRINTS = 64

#: Below this number of documents, the long ones are searched for at every start, which takes milliseconds.
MIN_DOCUMENTS = 1 << 22
PIECES_MAGIC = int.from_bytes(b"mgrpiece", "little")
PIECES_VERSION = 2
#: bytes read at a time for hashing.
BLOCK = 1 << 20


def sidecar_path(prefix: Path) -> Path:
    """The file next to the corpus."""
    return prefix.with_name(prefix.name + ".megaresume.json")


def cache_path(prefix: Path) -> Path | None:
    """The file used instead if the corpus's directory is read-only; None for a user without a home directory."""
    directory = cache_directory()
    if directory is None:
        return None
    key = xxhash.xxh3_64_hexdigest(os.fsencode(prefix.resolve()))
    return directory / f"{prefix.name}-{key}.json"


def read_fingerprint(prefix: Path, identity: CorpusIdentity, start: int, stop: int) -> Fingerprint | None:
    """The cached fingerprint of documents start to stop, if it was computed for exactly these files.

    Raises:
        CorpusError: the file next to the corpus is damaged or of a newer version.
    """
    for data in _kept(prefix):
        for entry in data.get("fingerprints", []):
            if _is_of(entry, identity) and entry.get("range") == [start, stop]:
                try:
                    return Fingerprint(
                        documents=int(entry["documents"]),
                        tokens=int(entry["tokens"]),
                        lengths=str(entry["lengths"]),
                        contents=str(entry["contents"]),
                        trained=None if identity.spans is None else str(entry["trained"]),
                    )
                except (KeyError, TypeError, ValueError):
                    continue  # a damaged cache entry: compute it again
    return None


def _kept(prefix: Path) -> Iterator[Mapping[str, Any]]:
    """The cached data of a corpus: from the file beside it, then from the cache directory."""
    yield _read(sidecar_path(prefix))
    yield _read_cache(cache_path(prefix))


def _is_of(entry: Mapping[str, Any], identity: CorpusIdentity) -> bool:
    return {name: entry.get(name) for name in CorpusIdentity.__slots__} == asdict(identity)


def write_fingerprint(prefix: Path, identity: CorpusIdentity, start: int, stop: int, fingerprint: Fingerprint) -> None:
    """Cache a fingerprint next to the corpus, or in the user's cache directory, or not at all.

    Raises:
        CorpusError: the file next to the corpus is damaged or of a newer version.
    """
    entry = {
        **asdict(identity),
        "range": [start, stop],
        "documents": fingerprint.documents,
        "tokens": fingerprint.tokens,
        "lengths": fingerprint.lengths,
        "contents": fingerprint.contents,
        "trained": fingerprint.trained,
    }
    for path, read in ((sidecar_path(prefix), _read), (cache_path(prefix), _read_cache)):
        if path is None:
            break
        data = dict(read(path)) or {"format": FORMAT, "version": VERSION, "tokenizer": None}
        # Entries for older files will never be used again.
        kept = [e for e in data.get("fingerprints", []) if _is_of(e, identity) and e.get("range") != entry["range"]]
        data["fingerprints"] = [*kept[-(MAX_FINGERPRINTS - 1) :], entry]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomically(path, data)
        except OSError:
            continue  # read-only, full or not ours: try the next place, else do not cache
        return


def read_tokenizer(prefix: Path, *, idx_bytes: int, bin_bytes: int) -> Mapping[str, Any] | None:
    """Read what `write_tokenizer` wrote for files of these sizes; None if unknown.

    Raises:
        CorpusError: the file is damaged or of a newer version.
    """
    tokenizer = _read(sidecar_path(prefix)).get("tokenizer")
    if not isinstance(tokenizer, dict):
        return None
    if (tokenizer.get("idx_bytes"), tokenizer.get("bin_bytes")) != (idx_bytes, bin_bytes):
        return None
    if not isinstance(tokenizer.get("fingerprint"), str):
        raise _damaged(sidecar_path(prefix), "a tokenizer without its fingerprint")
    return tokenizer


def write_tokenizer(
    prefix: Path,
    tokenizer: Mapping[str, Any],
    *,
    idx_bytes: int,
    bin_bytes: int,
    spans_bytes: int | None = None,
    spans_hash: str | None = None,
) -> None:
    """Start a new sidecar for a corpus that was just built.

    Args:
        prefix: of the corpus.
        tokenizer: ``fingerprint`` and further details, plain JSON.
        idx_bytes: size of the .idx.
        bin_bytes: size of the .bin.
        spans_bytes: size of the .spans; None if every token is trained.
        spans_hash: hash in the header of the .spans.

    Raises:
        OSError: it cannot be written.
    """
    sizes = {"idx_bytes": idx_bytes, "bin_bytes": bin_bytes, "spans_bytes": spans_bytes, "spans_hash": spans_hash}
    known = {"format": FORMAT, "version": VERSION, "tokenizer": {**tokenizer, **sizes}, "fingerprints": []}
    write_json_atomically(sidecar_path(prefix), known)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = read_file(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _damaged(path, f"it cannot be read ({error.strerror})") from error
    try:
        data = parse_json(text)
    except ValueError as error:
        raise _damaged(path, f"{len(text)} bytes that are not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("fingerprints", []), list):
        raise _damaged(path, "JSON of another kind")
    version = data.get("version")
    if type(version) is not int or version < 1:
        raise _damaged(path, f"version {version!r}")
    if version != VERSION:
        raise CorpusError(
            f"{path} has a version that this release cannot read",
            found=f"version {version}",
            expected=f"version {VERSION}",
            cause="it was written by a newer megaresume",
            action="upgrade: pip install --upgrade megaresume",
        )
    entries = [e for e in data.get("fingerprints", []) if isinstance(e, dict)]
    return {**data, "fingerprints": entries}


def _read_cache(path: Path | None) -> Mapping[str, Any]:
    """Read a file in the cache directory; nothing is lost if it is damaged: its contents are computed again."""
    try:
        return {} if path is None else _read(path)
    except CorpusError:
        return {}


def _damaged(path: Path, found: str) -> CorpusError:
    return CorpusError(
        f"{path} is damaged",
        found=found,
        expected=f"the JSON that megaresume keeps beside a corpus (format {FORMAT!r})",
        cause="edited by hand, or a damaged disk",
        action=f"remove {path}: fingerprints are computed again, the identity of the tokenizer is lost",
    )


def kept_list(source: LengthSource, prefix: Path, idx: FileIdentity, piece: int) -> LongDocuments:
    """The documents of a corpus that are longer than a piece, from a file saved by an earlier start if there is one.

    Args:
        source: the corpus.
        prefix: of the corpus.
        idx: its index as it was opened.
        piece: length in tokens.
    """
    if len(source) < MIN_DOCUMENTS:
        return find_long(source, piece)
    header = [PIECES_MAGIC, PIECES_VERSION, idx.size, idx.mtime_ns, idx.inode, piece]
    suffix = f".megaresume.{piece}.pieces"
    cache = cache_path(prefix)
    places = [prefix.with_name(prefix.name + suffix)]
    if cache is not None:
        places.append(cache.with_name(cache.stem + suffix))
    for path in places:
        if (found := _read_pieces(path, header)) is not None:
            return found
    with progress(f"long documents of {prefix.name}", len(source), "documents") as advance:
        found = find_long(source, piece, update=advance)
    for path in places:
        with contextlib.suppress(OSError):  # read-only, full or not ours: try the next place
            _write_pieces(path, header, found)
            return _read_pieces(path, header) or found  # mapped: saves memory, 0.2 bytes per document of the corpus
    return found


def _read_pieces(path: Path, header: list[int]) -> LongDocuments | None:
    """Read the lists of pieces; None if they are missing, damaged or of another corpus."""
    begin = len(header) + 2
    try:
        with open(path, "rb") as file:
            head = np.fromfile(file, "<i8", begin)
            if len(head) < begin or head[:-2].tolist() != header:
                return None
            num, later = head[-2:].tolist()
            count = begin + num // STRIDE + 2 * num
            if os.fstat(file.fileno()).st_size != 8 * (count + 1) or not _is_whole(file, 8 * count):
                return None
            file.seek(8 * begin)
            guide = np.fromfile(file, "<i8", num // STRIDE)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):
        return None
    if hasattr(mmap, "MADV_RANDOM"):
        data.madvise(mmap.MADV_RANDOM)  # read-ahead after each look-up only costs time
    ids, ends = np.split(np.frombuffer(data, "<i8", count)[begin + len(guide) :], 2)
    return None if num and ends[-1] != later else LongDocuments(ids, ends, guide)


def _is_whole(file: BinaryIO, nbytes: int) -> bool:
    """Whether the first ``nbytes`` bytes of a file are followed by their xxh3_64."""
    hasher = xxhash.xxh3_64()
    file.seek(0)
    for start in range(0, nbytes, BLOCK):
        hasher.update(file.read(min(BLOCK, nbytes - start)))
    return file.read() == hasher.digest()


def _write_pieces(path: Path, header: list[int], found: LongDocuments) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    later = int(found.ends[-1]) if len(found.ends) else 0
    hasher = xxhash.xxh3_64()
    with written_atomically(path) as file:
        for part in ([*header, len(found.ids), later], found.guide, found.ids, found.ends):
            numbers = np.ascontiguousarray(part, "<i8")
            hasher.update(numbers.data)
            numbers.tofile(file)
        file.write(hasher.digest())
