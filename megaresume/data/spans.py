"""``<prefix>.spans``, for reader and writer: which tokens of a corpus are trained. Without the file, all are.

    document 0   <|im_start|> user Hi <|im_end|> <|im_start|> assistant Hello ! <|im_end|>      spans of 0: [6, 9)
                                                                        xxxxx x xxxxxxxxxx

A *span* is a run of tokens of one document that are to be predicted: the loss counts labels within it. Spans of a
document are in order and do not touch. A preference pair, which is two conversations in one document, has one empty
span, where the rejected one begins. The file (little-endian):

    bytes   what
    8       magic ``MGRSPANS``
    8       version, uint64, always 1
    8       D, documents, uint64
    8       S, spans, uint64
    8       tokens of the corpus, uint64
    8       of these, tokens in spans, uint64
    8       xxh3_64 of all that follows, uint64
    8 D+8   the spans of document d are bound[d] to bound[d + 1]; the first is 0, the last S; int64
    8 S     first token of each span, and the one after its last, counted in its document; int32 pairs

`megaresume prepare` writes it for conversations. Its hash is part of the corpus's fingerprint: with other spans, or
none, it is another corpus. Raise `SPANS_VERSION` when a reader of the old version would misread the new one.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.stream.arrays import Int64Array
from megaresume.stream.errors import CorpusError

if TYPE_CHECKING:
    from megaresume.data.source import Source

Int32Array = npt.NDArray[np.int32]

SPANS_MAGIC = b"MGRSPANS"
SPANS_VERSION = 1
_SPANS_HEADER = struct.Struct("<8s6Q")
#: documents checked at a time.
CHUNK = 1 << 20
REBUILD = "copy the .spans again with its .bin and .idx, or rebuild the corpus: megaresume prepare"


def spans_path(prefix: Path) -> Path:
    """The path of a corpus's spans."""
    return prefix.with_name(prefix.name + ".spans")


@dataclass(frozen=True, slots=True)
class Spans:
    """Which tokens of n documents are trained."""

    #: int64[n + 1]: the spans of document k are ``starts[k] .. starts[k + 1]``.
    starts: Int64Array
    #: int32[s, 2]: first token of each span, and the one after its last, counted in its document.
    spans: Int32Array

    def mask(self, k: int, offset: int, length: int) -> npt.NDArray[np.bool_]:
        """Which tokens of document k are trained, from token ``offset`` on: bool[length]."""
        mask = np.zeros(length, np.bool_)
        for first, stop in self.spans[self.starts[k] : self.starts[k + 1]].tolist():
            mask[max(first - offset, 0) : max(stop - offset, 0)] = True
        return mask

    def count(self, offsets: Int64Array, lengths: Int64Array) -> Int64Array:
        """The number of trained tokens in ``lengths[k]`` tokens of document k from ``offsets[k]`` on; int64[n]."""
        each = np.diff(self.starts)
        first, stop = np.repeat(offsets, each), np.repeat(offsets + lengths, each)
        inside = np.minimum(self.spans[:, 1], stop) - np.maximum(self.spans[:, 0], first)
        before = np.concatenate([[0], np.cumsum(np.maximum(inside, 0))])
        return np.asarray(before[self.starts[1:]] - before[self.starts[:-1]], np.int64)


def spans_of(source: object, ids: Int64Array) -> Spans | None:
    """The trained tokens of these documents; None if the source does not say: all of them."""
    ask: Callable[[Int64Array], Spans | None] | None = getattr(source, "trained_spans", None)
    return None if ask is None else ask(ids)


def has_spans(source: object) -> bool:
    """Whether a source knows which tokens are trained."""
    return spans_of(source, np.zeros(0, np.int64)) is not None


def has_pairs(source: Source) -> bool:
    """Whether the first document of a source is a preference pair; then `megaresume prepare` made all of them pairs."""
    spans = spans_of(source, np.zeros(min(len(source), 1), np.int64))
    return spans is not None and bool((spans.spans[:, 0] == spans.spans[:, 1]).any())


class SpansHeader(NamedTuple):
    """Bytes 16 to 56 of the file, after magic and version."""

    documents: int
    spans: int
    #: tokens of the corpus, and how many of them are in spans.
    tokens: int
    trained: int
    #: xxh3_64 of everything after the header.
    hash: int

    @property
    def spans_at(self) -> int:
        """Byte offset of int32[spans, 2]; the bounds before it begin at `SPANS_HEADER_BYTES`."""
        return SPANS_HEADER_BYTES + 8 * (self.documents + 1)

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.spans_at + 8 * self.spans


SPANS_HEADER_BYTES = _SPANS_HEADER.size


def check_is_prepared(found: SpanFile, prepared: str | None) -> None:
    """Refuse the .spans of another corpus with as many documents and tokens.

    Args:
        found: the file beside the corpus.
        prepared: hash of the .spans that was written with the corpus; None if unknown.

    Raises:
        CorpusError: it is a different one: other tokens would be trained.
    """
    if prepared is not None and prepared != (has := f"{found.header.hash:016x}"):
        raise CorpusError(
            f"{found.path} is not of this corpus",
            found=f"hash {has}",
            expected=f"hash {prepared}, as prepared",
            cause="a corpus that was copied over an older one, and not completely",
            action=REBUILD,
        )


def check_needs_none(path: Path, prepared: int | None) -> None:
    """Refuse a corpus that was prepared with a .spans and no longer has one.

    Args:
        path: where it would be.
        prepared: size of the .spans that was written with the corpus; None if there was none, or it is unknown.

    Raises:
        CorpusError: it is missing: every token would be trained.
    """
    if prepared is not None:
        raise CorpusError(
            f"{path} is missing",
            found="a corpus of which only some tokens are trained, without the file that says which",
            expected=f"{prepared} bytes, as prepared",
            cause="a corpus that was not copied completely: every token of it would be trained",
            action="copy it with the .bin and the .idx, or build the corpus again: megaresume prepare",
        )


class SpanFile:
    """The spans of a corpus, read from the mapped file.

    Opening checks the header and the ends of the arrays; `check` reads them all.

    Args:
        path: of the file.
        data: the whole file, mapped.
        documents, tokens: of the corpus beside it.

    Raises:
        CorpusError: its header or the ends of its arrays are damaged, or it is of another corpus.
    """

    def __init__(self, path: Path, data: mmap.mmap | bytes, *, documents: int, tokens: int) -> None:
        self.path = path
        self.header = self._read_header(bytes(data[:SPANS_HEADER_BYTES]), len(data))
        if (self.header.documents, self.header.tokens) != (documents, tokens):
            raise CorpusError(
                f"{path} is of another corpus",
                found=f"spans of {self.header.documents} documents with {self.header.tokens} tokens",
                expected=f"{documents} documents with {tokens} tokens, as its .idx and .bin have",
                cause="the corpus was built again by another program, or files of two builds were mixed",
                action=f"{REBUILD}; if all tokens are to be trained, remove {path.name}",
            )
        self._bounds: Int64Array = np.frombuffer(data, "<i8", documents + 1, SPANS_HEADER_BYTES)
        self._spans: Int32Array = np.frombuffer(data, "<i4", 2 * self.header.spans, self.header.spans_at).reshape(-1, 2)
        if self._bounds[0] != 0 or self._bounds[-1] != self.header.spans:
            raise self._damaged(f"documents from span {self._bounds[0]} to {self._bounds[-1]}")

    def _read_header(self, data: bytes, size: int) -> SpansHeader:
        if len(data) < SPANS_HEADER_BYTES or data[: len(SPANS_MAGIC)] != SPANS_MAGIC:
            raise self._damaged(f"{size} bytes that begin with {data[: len(SPANS_MAGIC)]!r}")
        _, version, *fields = _SPANS_HEADER.unpack(data)
        if version != SPANS_VERSION:
            raise CorpusError(
                f"{self.path} has an unknown version",
                found=f"version {version}",
                expected=f"version {SPANS_VERSION}",
                cause="a damaged file, or one that a newer megaresume wrote",
                action="upgrade: pip install --upgrade megaresume; or rebuild the corpus: megaresume prepare",
            )
        header = SpansHeader(*fields)
        if size != header.size:
            counts = f"{header.documents} documents and {header.spans} spans"
            raise self._damaged(f"{size} bytes for {counts}, which take {header.size}")
        return header

    def of(self, ids: Int64Array) -> Spans:
        """The spans of documents, each in [0, documents).

        Raises:
            CorpusError: the file is damaged there.
        """
        first, stop = self._bounds[ids], self._bounds[ids + 1]
        counts = stop - first
        if ids.size and (counts.min() < 0 or first.min() < 0 or stop.max() > self.header.spans):
            raise self._damaged(f"inconsistent bounds, of document {int(ids[np.argmin(counts)])} or near it")
        starts = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        places = np.repeat(first - starts[:-1], counts) + np.arange(starts[-1])
        return Spans(starts, self._spans[places])

    def hash(self, start: int, stop: int) -> str:
        """The hash for documents start to stop, as if they were all: xxh3_64 of bounds, then spans; 16 hex digits.

        Raises:
            CorpusError: the file is damaged there.
        """
        first, last = int(self._bounds[start]), int(self._bounds[stop])
        if not 0 <= first <= last <= self.header.spans:
            raise self._damaged(f"spans {first} to {last} of documents {start} to {stop}")
        hasher = xxhash.xxh3_64()
        for at in range(start, stop + 1, CHUNK):
            hasher.update((self._bounds[at : min(at + CHUNK, stop + 1)] - first).astype("<i8").data)
        hasher.update(np.ascontiguousarray(self._spans[first:last]).data)
        return hasher.hexdigest()

    def check(self, lengths: Callable[[Int64Array], Int64Array]) -> None:
        """Check the whole file.

        Args:
            lengths: int64[n] document numbers to int64[n] tokens.

        Raises:
            CorpusError: it is damaged, or not of documents of these lengths.
        """
        from megaresume.data.kernels import check_spans

        hasher = xxhash.xxh3_64(self._bounds.data)
        hasher.update(self._spans.data)
        if hasher.intdigest() != self.header.hash:
            raise self._damaged(f"hash {hasher.hexdigest()}", f"{self.header.hash:016x}, as when it was written")
        for first in range(0, self.header.documents, CHUNK):
            ids = np.arange(first, min(first + CHUNK, self.header.documents), dtype=np.int64)
            bad = check_spans(self._bounds[first : first + len(ids) + 1], self._spans, lengths(ids))
            if bad >= 0:
                spans = self.of(ids[bad : bad + 1]).spans[:4].tolist()
                raise self._damaged(
                    f"document {first + bad} of {int(lengths(ids[bad : bad + 1])[0])} tokens has spans {spans}",
                    "spans in order, within their document, that do not touch",
                )

    def _damaged(
        self, found: str, expected: str = "the spans that megaresume prepare writes beside a corpus"
    ) -> CorpusError:
        return CorpusError(
            f"{self.path} is damaged",
            found=found,
            expected=expected,
            cause="a copy that was interrupted, a damaged disk, or a file of another program",
            action=REBUILD,
        )


class SpansWriter:
    """Writes a .spans while documents come.

    Args:
        file: open for writing and reading, empty.
        documents, spans: their total numbers.
    """

    def __init__(self, file: BinaryIO, *, documents: int, spans: int) -> None:
        self._file = file
        self._header = SpansHeader(documents=documents, spans=spans, tokens=0, trained=0, hash=0)
        self._documents = self._spans = self._trained = 0
        self._put(SPANS_HEADER_BYTES, np.zeros(1, "<i8"))

    def add(self, counts: npt.NDArray[np.integer[Any]], spans: Int32Array) -> None:
        """Add the next documents.

        Args:
            counts: integers[n], spans of each.
            spans: int32[sum of counts, 2], as in `Spans`.

        Raises:
            OSError: it cannot be written.
        """
        ends = self._spans + np.cumsum(counts, dtype="<i8")
        self._put(SPANS_HEADER_BYTES + 8 * (self._documents + 1), ends)
        self._put(self._header.spans_at + 8 * self._spans, np.ascontiguousarray(spans, "<i4"))
        self._documents += len(counts)
        self._spans += len(spans)
        self._trained += int((spans[:, 1].astype(np.int64) - spans[:, 0]).sum())

    def finish(self, tokens: int) -> str:
        """Write the header, which completes the file; returns its hash, 16 hex digits.

        Args:
            tokens: of the corpus.

        Raises:
            OSError: it cannot be written.
        """
        assert (self._documents, self._spans) == (self._header.documents, self._header.spans), "documents are missing"
        hasher = xxhash.xxh3_64()
        self._file.seek(SPANS_HEADER_BYTES)
        while data := self._file.read(CHUNK):
            hasher.update(data)
        header = self._header._replace(tokens=tokens, trained=self._trained, hash=hasher.intdigest())
        self._file.seek(0)
        self._file.write(_SPANS_HEADER.pack(SPANS_MAGIC, SPANS_VERSION, *header))
        return f"{header.hash:016x}"

    def _put(self, at: int, array: npt.NDArray[Any]) -> None:
        self._file.seek(at)
        self._file.write(array.data if array.size else b"")
