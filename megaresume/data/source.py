"""Sources, as loading needs them: the lengths that the stream is planned with, and the tokens.

Source           documents by number
  TokenSource      all tokens in one array: a compiled loop copies them
  DocumentSource   tokens and images of one document together, with randomness that is keyed by what it is
BaseSource       base of our own sources: everything that follows from lengths and reads

The results of a `DocumentSource` are in `megaresume.encoding.images.document`.

The fingerprint of any source covers the lengths of all documents, and windows of tokens at fixed places: `PLACES`
windows of at most `WINDOW` tokens, spread evenly, the same on every machine:

    at least PLACES documents   one document in each of PLACES equal ranges, with one window
    fewer                       every document, each with PLACES // documents windows
    a document that is so short that its windows would cover it is read whole

The places depend on the number of documents and their lengths alone. So the hash of the first n documents of a corpus
that has grown is the hash that the corpus had with n documents. Tokens are hashed as int64 (those of a corpus of floats
as float64): the dtype in which a corpus is stored does not matter, as it does not matter to the stream.
"""

from __future__ import annotations

import inspect
import struct
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.stream.arrays import Int64Array
from megaresume.stream.progress import progress
from megaresume.stream.state import Fingerprint

if TYPE_CHECKING:
    from megaresume.encoding.images.document import EncodedDocument, Key
    from megaresume.encoding.images.encoder import ImageTextEncoder


@runtime_checkable
class Source(Protocol):
    """Documents by number: the interface of every opened source. A user's object needs less: see `PythonSource`."""

    def __len__(self) -> int:
        """The number of documents."""

    def length(self, i: int) -> int:
        """The number of tokens of document i."""

    def lengths(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The tokens of each document: int64[n] to int64[n]."""

    def get(self, i: int) -> npt.NDArray[Any]:
        """The tokens of document i, shape (length(i),)."""

    def read(self, i: int, offset: int, length: int) -> npt.NDArray[Any]:
        """`length` tokens of document i from token `offset` on."""

    def fingerprint(self, *, first: int | None = None, recompute: bool = False) -> Fingerprint:
        """The identity of the source: documents, tokens, hash of the lengths, tokenizer, contents.

        Args:
            first: cover only this many documents, as if there were no more; None: all.
            recompute: ignore caches.
        """


@runtime_checkable
class TokenSource(Source, Protocol):
    """A source whose tokens are in one array, so that a kernel can copy them without a call per document."""

    @property
    def token_view(self) -> npt.NDArray[Any]:
        """All tokens, one-dimensional, read-only."""

    def token_starts(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where each document starts in `token_view`: int64[n] to int64[n], in tokens."""


@runtime_checkable
class DocumentSource(Source, Protocol):
    """A source of image-text documents, which are always read whole."""

    @property
    def whole(self) -> bool:
        """True: its documents must not be cut."""

    @property
    def encoder(self) -> ImageTextEncoder:
        """The encoder that makes its documents."""

    def encoded(self, i: int, key: Key) -> EncodedDocument:
        """Document i, exactly ``length(i)`` tokens. ``key`` is the only source of randomness.

        Raises:
            CorpusError: it cannot be read, or differs from the index and the policy is ``error``.
        """


DOCUMENT_MEMBERS = ("__len__", "length", "lengths", "get", "read", "fingerprint", "whole", "encoder", "encoded")


def is_document_source(thing: object) -> TypeGuard[DocumentSource]:
    """`isinstance` for `DocumentSource` that does not touch ``encoder``, which may have to build a tokenizer."""
    return all(inspect.getattr_static(thing, member, None) is not None for member in DOCUMENT_MEMBERS)


class BaseSource(Source):
    """Base of our own sources: everything that follows from ``lengths`` and `read`."""

    @property
    def _where(self) -> str:
        """The name of the source in an error about a document's number."""
        return ""

    @abstractmethod
    def range_fingerprint(self, start: int, stop: int, *, recompute: bool = False) -> Fingerprint:
        """The fingerprint of documents start to stop."""

    def length(self, i: int) -> int:
        """The number of tokens of document i; raises as ``lengths``."""
        return int(self.lengths(np.array([i], np.int64))[0])

    def get(self, i: int) -> npt.NDArray[Any]:
        """The tokens of document i, shape (length(i),); raises as `read`."""
        return self.read(i, 0, self.length(i))

    def fingerprint(self, *, first: int | None = None, recompute: bool = False) -> Fingerprint:
        """The identity of the source.

        Args:
            first: cover only this many documents, as if there were no more; None: all.
            recompute: ignore caches.

        Raises:
            CorpusError: the source is damaged, or changes while it is read.
        """
        return self.range_fingerprint(0, len(self) if first is None else first, recompute=recompute)

    def _check_id(self, i: int) -> None:
        if not 0 <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}{self._where}")

    def _check_ids(self, ids: Int64Array) -> Int64Array:
        ids = np.asarray(ids, np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= len(self)):
            raise IndexError(f"documents {ids.min()} to {ids.max()} of {len(self)}{self._where}")
        return ids

    def _check_range(self, i: int, offset: int, length: int) -> None:
        total = self.length(i)
        if offset < 0 or length < 0 or offset + length > total:
            raise IndexError(f"tokens {offset} to {offset + length} of document {i}, which has {total}")


#: windows of a corpus in files.
PLACES = 1000
#: documents read from any other source: each may be a request to a store, or a picture to decode.
OBJECT_PLACES = 100
#: The number of tokens of a window.
WINDOW = 1024
#: lengths read at once; the hash does not depend on it.
CHUNK = 1 << 16


def scan_fingerprint(
    lengths: Callable[[Int64Array], Int64Array],
    documents: int,
    what: str,
    *,
    read: Callable[[int, int, int], npt.NDArray[Any]] | None = None,
    tokenizer: str | None = None,
) -> Fingerprint:
    """xxh3_128 of the lengths of all documents as little-endian int64, in document order; shows progress.

    Args:
        lengths: int64[n] document numbers to int64[n] tokens.
        documents: their number.
        what: shown with the progress, a few words.
        read: (document, offset, count) to its tokens, for the hash of the contents; None to leave that out.
        tokenizer: its fingerprint, if known.
    """
    hasher, tokens = xxhash.xxh3_128(), 0
    with progress(what, documents, "documents") as advance:
        for first in range(0, documents, CHUNK):
            chunk = lengths(np.arange(first, min(first + CHUNK, documents), dtype=np.int64))
            hasher.update(np.ascontiguousarray(chunk, "<i8").data)
            tokens += int(chunk.sum())
            advance(len(chunk))
    return Fingerprint(
        documents=documents,
        tokens=tokens,
        lengths=hasher.hexdigest(),
        tokenizer=tokenizer,
        contents=None if read is None else contents_hash(documents, lengths, read, OBJECT_PLACES),
    )


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of tokens to hash, in order: three int64[w]."""

    documents: Int64Array
    #: first token of the window in the document.
    offsets: Int64Array
    #: tokens in the window, at least 1.
    counts: Int64Array

    @classmethod
    def choose(cls, documents: int, lengths: Callable[[Int64Array], Int64Array], places: int = PLACES) -> Windows:
        """Choose the windows of a source.

        Args:
            documents: their number.
            lengths: int64[n] document numbers to int64[n] tokens.
            places: most windows, not counting documents short enough to be read whole.
        """
        ids = _documents(documents, places)
        each = max(places // max(documents, 1), 1)
        chosen = [
            (i, offset, count)
            for i, length in zip(ids.tolist(), lengths(ids).tolist(), strict=True)
            for offset, count in _within(i, length, each)
        ]
        return cls(*np.array(chosen, np.int64).reshape(-1, 3).T)


def sized_fingerprint(
    lengths: Callable[[Int64Array], Int64Array],
    sizes: Callable[[Int64Array], Int64Array],
    documents: int,
    what: str,
) -> Fingerprint:
    """`scan_fingerprint`, with the hash of the sizes that documents are grouped by in place of their lengths'."""
    scanned = scan_fingerprint(lengths, documents, what)
    return replace(scanned, lengths=scan_fingerprint(sizes, documents, what).lengths)


def contents_hash(
    documents: int,
    lengths: Callable[[Int64Array], Int64Array],
    read: Callable[[int, int, int], npt.NDArray[Any]],
    places: int = PLACES,
    *,
    mapped: Callable[..., Iterable[npt.NDArray[Any]]] = map,
) -> str:
    """The hash of the contents of a source that is read document by document.

    Args:
        documents, lengths, places: see `Windows.choose`.
        read: (document, offset, count) to its tokens.
        mapped: like ``map``: calls ``read`` for all windows.
    """
    windows = Windows.choose(documents, lengths, places)
    columns = (windows.documents.tolist(), windows.offsets.tolist(), windows.counts.tolist())
    return hash_tokens(mapped(read, *columns))


def hash_tokens(windows: Iterable[npt.NDArray[Any]]) -> str:
    """The hash of all tokens of windows as little-endian int64 or float64: xxh3_64, 16 hex digits."""
    hasher = xxhash.xxh3_64()
    for tokens in windows:
        hasher.update(np.ascontiguousarray(tokens, "<f8" if tokens.dtype.kind == "f" else "<i8").data)
    return hasher.hexdigest()


def _documents(documents: int, places: int) -> Int64Array:
    """One document in each of ``places`` equal ranges, in order; all documents, if there are no more than that."""
    if documents <= places:
        return np.arange(documents, dtype=np.int64)
    bounds = [k * documents // places for k in range(places + 1)]
    return np.array([low + _draw(documents, low) % (high - low) for low, high in pairwise(bounds)], np.int64)


def _within(document: int, length: int, each: int) -> list[tuple[int, int]]:
    """(offset, tokens) of the windows of a document: one in each of ``each`` equal ranges."""
    if length <= each * WINDOW:
        return [(0, length)] if length else []
    bounds = [k * length // each for k in range(each + 1)]
    return [(low + _draw(document, length, low) % (high - low - WINDOW + 1), WINDOW) for low, high in pairwise(bounds)]


def _draw(*numbers: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(numbers)}q", *numbers))
