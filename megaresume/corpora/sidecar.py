"""``<prefix>.megaresume.json``: what we know about a corpus and would rather not compute twice.

    {"format": "megaresume.corpus", "version": 1,
     "tokenizer": {"fingerprint": ..., "vocabulary": ..., "name": ..., "vocab_size": ..., "eod": ...,
                   "append_eod": ..., "idx_bytes": ..., "bin_bytes": ..., "spans_bytes": ... or null,
                   "spans_hash": "16 hex digits" or null} or null,
     "fingerprints": [{"idx": {"size": ..., "mtime_ns": ..., "ctime_ns": ..., "inode": ...}, "bin": {...},
                       "spans": {...} or null, "range": [start, stop], "documents": ..., "tokens": ...,
                       "lengths": "32 hex digits", "contents": "16 hex digits", "trained": "16 hex digits" or null}]}

``fingerprints`` is a cache: hashing the lengths of 10^9 documents takes a minute, and a resume must not wait for it. An
entry holds as long as the .idx, the .bin and the .spans have the same size, times of change and inode. The time at
which an inode changed (ctime) cannot be set back: a file that is written in place is noticed also if its mtime is
restored, as ``rsync --inplace --times`` and ``cp --preserve`` do. ``tokenizer`` was written by ``megaresume prepare``;
it holds for files of those sizes, so that it survives a copy, but not a rebuild by another program. Where the corpus
cannot be written to, the cache goes to ``$MEGARESUME_CACHE`` or the XDG cache directory.

Raise `VERSION` when a reader of the old version would misread the new one; older versions of the cache may be ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from megaresume.checkpoint.files import read_file
from megaresume.corpora.layout import idx_path
from megaresume.corpora.spans import spans_path
from megaresume.stream.errors import CorpusError
from megaresume.stream.state import Fingerprint
from megaresume.stream.text import parse_json

FORMAT = "megaresume.corpus"
VERSION = 1
#: entries kept; train, valid and test of a few splits.
MAX_FINGERPRINTS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class FileIdentity:
    """A file that is still the same one, as far as the file system can tell without reading it."""

    #: bytes.
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileIdentity:
        """From `os.stat` or `os.fstat`."""
        return cls(size=stat.st_size, mtime_ns=stat.st_mtime_ns, ctime_ns=stat.st_ctime_ns, inode=stat.st_ino)

    def is_the_file(self, other: FileIdentity) -> bool:
        """Whether a run may go on with it: a touch, a chmod or a hard link is no reason to stop one."""
        return (self.size, self.inode) == (other.size, other.inode)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusIdentity:
    """The files of a corpus."""

    idx: FileIdentity
    #: the .bin, or what stands in its place.
    bin: FileIdentity
    #: None: it has none.
    spans: FileIdentity | None = None

    @classmethod
    def of(cls, prefix: Path, tokens: str = ".bin") -> CorpusIdentity:
        """As they are now.

        Args:
            prefix: of the corpus.
            tokens: suffix of the file that says what the tokens are.

        Raises:
            OSError: one cannot be looked at.
        """
        spans = None
        with contextlib.suppress(FileNotFoundError):
            spans = FileIdentity.of(spans_path(prefix).stat())
        bin_ = prefix.with_name(prefix.name + tokens)
        return cls(idx=FileIdentity.of(idx_path(prefix).stat()), bin=FileIdentity.of(bin_.stat()), spans=spans)


def sidecar_path(prefix: Path) -> Path:
    """The file next to the corpus."""
    return prefix.with_name(prefix.name + ".megaresume.json")


def cache_directory() -> Path | None:
    """Of this user; None for one without a home."""
    if base := os.environ.get("MEGARESUME_CACHE"):
        return Path(base)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "megaresume"
    try:
        return Path.home() / ".cache" / "megaresume"
    except RuntimeError:  # a container that runs under a number that no user has
        return None


def cache_path(prefix: Path) -> Path | None:
    """The file that stands for it where the corpus cannot be written to; None for a user without a home."""
    directory = cache_directory()
    if directory is None:
        return None
    key = xxhash.xxh3_64_hexdigest(os.fsencode(prefix.resolve()))
    return directory / f"{prefix.name}-{key}.json"


def read_fingerprint(prefix: Path, identity: CorpusIdentity, start: int, stop: int) -> Fingerprint | None:
    """The cached fingerprint of documents start to stop, if it was computed for these very files.

    Raises:
        CorpusError: the file next to the corpus is damaged or of a newer version.
    """
    for data in (_read(sidecar_path(prefix)), _read_cache(cache_path(prefix))):
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
                    continue  # it is only a cache: compute it again
    return None


def _is_of(entry: Mapping[str, Any], identity: CorpusIdentity) -> bool:
    return {name: entry.get(name) for name in CorpusIdentity.__slots__} == asdict(identity)


def write_fingerprint(
    prefix: Path, identity: CorpusIdentity, start: int, stop: int, fingerprint: Fingerprint
) -> Path | None:
    """Cache a fingerprint next to the corpus, or in the user's cache directory, or not at all.

    Returns:
        the file that now holds it; None if no place could be written to.

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
        # Entries of older files will never be looked up again.
        kept = [e for e in data.get("fingerprints", []) if _is_of(e, identity) and e.get("range") != entry["range"]]
        data["fingerprints"] = [*kept[-(MAX_FINGERPRINTS - 1) :], entry]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomically(path, data)
        except OSError:
            continue  # read-only, full or not ours: the next place, or without a cache
        return path
    return None


def read_tokenizer(prefix: Path, *, idx_bytes: int, bin_bytes: int) -> Mapping[str, Any] | None:
    """What `write_tokenizer` wrote for files of these sizes; None if unknown.

    Raises:
        CorpusError: the file is damaged or of a newer version.
    """
    tokenizer = _read(sidecar_path(prefix)).get("tokenizer")
    if not isinstance(tokenizer, dict):
        return None
    if (tokenizer.get("idx_bytes"), tokenizer.get("bin_bytes")) != (idx_bytes, bin_bytes):
        return None
    return tokenizer


def write_tokenizer(
    prefix: Path,
    tokenizer: Mapping[str, Any],
    *,
    idx_bytes: int,
    bin_bytes: int,
    spans_bytes: int | None = None,
    spans_hash: str | None = None,
) -> Path:
    """Start a new sidecar for a corpus that was just built.

    Args:
        prefix: of the corpus.
        tokenizer: ``fingerprint`` and what else is worth knowing, plain JSON.
        idx_bytes: size of the .idx.
        bin_bytes: size of the .bin.
        spans_bytes: size of the .spans; None: every token is trained.
        spans_hash: of the .spans, as its header has it.

    Raises:
        OSError: it cannot be written.
    """
    path = sidecar_path(prefix)
    sizes = {"idx_bytes": idx_bytes, "bin_bytes": bin_bytes, "spans_bytes": spans_bytes, "spans_hash": spans_hash}
    identity = {**tokenizer, **sizes}
    write_json_atomically(path, {"format": FORMAT, "version": VERSION, "tokenizer": identity, "fingerprints": []})
    return path


def write_json_atomically(path: Path, data: object) -> None:
    """Write by temporary file, fsync and rename: a reader sees the old file or the new one, never a part.

    Raises:
        OSError: it cannot be written; the temporary file is gone.
    """
    with written_atomically(path) as file:
        file.write(f"{json.dumps(data, indent=1)}\n".encode())


@contextlib.contextmanager
def written_atomically(path: Path) -> Iterator[BinaryIO]:
    """A temporary file to write to, which replaces `path` at the end; see `write_json_atomically`.

    Raises:
        OSError: it cannot be written; the temporary file is gone.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


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
        raise _damaged(path, f"{len(text)} bytes that are no JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("fingerprints", []), list):
        raise _damaged(path, "JSON of another kind")
    if data.get("version") != VERSION:
        raise CorpusError(
            f"{path} has a version that this release cannot read",
            found=f"version {data.get('version')!r}",
            expected=f"version {VERSION}",
            cause="it was written by a newer megaresume",
            action="upgrade: pip install --upgrade megaresume",
        )
    entries = [e for e in data.get("fingerprints", []) if isinstance(e, dict)]
    return {**data, "fingerprints": entries}


def _read_cache(path: Path | None) -> Mapping[str, Any]:
    """As `_read`, but nothing is lost with a damaged file in the cache directory: compute it again."""
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
