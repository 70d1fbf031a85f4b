"""Sources, as loading needs them: the lengths that the stream plans with, and the tokens themselves.

Source           documents by number
  TokenSource      all tokens in one array: a compiled loop copies them
  DocumentSource   tokens and images of one document together, with randomness that is keyed by what it is
BaseSource       base of our own sources: what follows from lengths and reads, wherever the tokens come from

What a `DocumentSource` gives is in `megaresume.encoding.images.document`.

The fingerprint of any source is of the lengths of all documents, and of windows of tokens at fixed places: `PLACES`
windows of at most `WINDOW` tokens, spread evenly, the same on every machine:

    at least PLACES documents   one document in each of PLACES equal ranges, and one window in each of these
    fewer                       every document, and in each of them PLACES // documents windows
    a document of so few tokens that its windows would cover it is read whole

Where they lie follows from the number of documents and their lengths alone. So the hash of the first n documents of a
corpus that has grown is the hash of the corpus when it had n. Tokens are hashed as int64 (those of a corpus of floats
as float64): in which dtype a corpus is stored does not matter, as it does not matter to the stream.
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


@runtime_checkable
class Source(Protocol):
    """Documents by number: what every opened source has. A user's object needs less: see `PythonSource`."""

    def __len__(self) -> int:
        """The number of documents."""
        ...

    def length(self, i: int) -> int:
        """The number of tokens of document i."""
        ...

    def lengths(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The tokens of each document: int64[n] to int64[n]."""
        ...

    def get(self, i: int) -> npt.NDArray[Any]:
        """The tokens of document i, shape (length(i),)."""
        ...

    def read(self, i: int, offset: int, length: int) -> npt.NDArray[Any]:
        """`length` tokens of document i from token `offset` on."""
        ...

    def fingerprint(self, *, first: int | None = None, recompute: bool = False) -> Fingerprint:
        """The identity of the source: documents, tokens, hash of the lengths, tokenizer, contents.

        Args:
            first: of its first documents only, as if there were no more; None: of all.
            recompute: believe nothing that was kept from an earlier time.
        """
        ...


@runtime_checkable
class TokenSource(Source, Protocol):
    """A source whose tokens lie in one array, so that a kernel can copy them without a call for each document."""

    @property
    def token_view(self) -> npt.NDArray[Any]:
        """All tokens, one-dimensional, read-only."""
        ...

    def token_starts(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where each document starts in `token_view`: int64[n] to int64[n], in tokens."""
        ...


class VisionEncoder(Protocol):
    """The encoder of a `DocumentSource`, as loading must know it before the first image is read."""

    @property
    def image_token_id(self) -> int:
        """The token that stands where features go."""
        ...

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """The shape of a tile or patch: ``EncodedImage.pixels`` without its first axis. The same for every image."""
        ...


@runtime_checkable
class DocumentSource(Source, Protocol):
    """A source of image-text documents, which are read whole."""

    @property
    def whole(self) -> bool:
        """True: its documents must never be cut."""
        ...

    @property
    def encoder(self) -> VisionEncoder:
        """The encoder that makes its documents."""
        ...

    def encoded(self, i: int, key: Key) -> EncodedDocument:
        """Document i, exactly ``length(i)`` tokens. Randomness comes from ``key`` alone.

        Raises:
            CorpusError: it cannot be read, or is not as the index says, and the policy is ``error``.
        """
        ...


DOCUMENT_MEMBERS = ("__len__", "length", "lengths", "get", "read", "fingerprint", "whole", "encoder", "encoded")


def is_document_source(thing: object) -> TypeGuard[DocumentSource]:
    """`isinstance` for `DocumentSource` that does not ask for the encoder, which may have a tokenizer to build."""
    return all(inspect.getattr_static(thing, member, None) is not None for member in DOCUMENT_MEMBERS)


class BaseSource(Source):
    """Base of our own sources: everything that follows from ``lengths`` and `read`, wherever the tokens come from."""

    @property
    def _where(self) -> str:
        """The source, for an error about a document's number."""
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
            first: of its first documents only, as if there were no more; None: of all.
            recompute: believe nothing that was kept from an earlier time.

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
#: documents of another source that are read: each may be a request to a store, or a picture to decode.
OBJECT_PLACES = 100
#: The number of tokens of a window.
WINDOW = 1024
#: documents asked for their length at once; the hash does not depend on it.
CHUNK = 1 << 16


def scan_fingerprint(
    lengths: Callable[[Int64Array], Int64Array],
    documents: int,
    what: str,
    *,
    read: Callable[[int, int, int], npt.NDArray[Any]] | None = None,
    tokenizer: str | None = None,
) -> Fingerprint:
    """xxh3_128 over the lengths of all documents as little-endian int64, in document order; with progress.

    Args:
        lengths: int64[n] document numbers to int64[n] tokens.
        documents: of the source.
        what: for the progress, a few words.
        read: (document, offset, count) to its tokens, for the contents; None if they are not looked at.
        tokenizer: its fingerprint, if known.
    """
    hasher, tokens = xxhash.xxh3_128(), 0
    with progress(what, documents, "documents") as bar:
        for first in range(0, documents, CHUNK):
            chunk = lengths(np.arange(first, min(first + CHUNK, documents), dtype=np.int64))
            hasher.update(np.ascontiguousarray(chunk, "<i8").data)
            tokens += int(chunk.sum())
            bar.update(len(chunk))
    return Fingerprint(
        documents=documents,
        tokens=tokens,
        lengths=hasher.hexdigest(),
        tokenizer=tokenizer,
        contents=None if read is None else contents_hash(documents, lengths, read, OBJECT_PLACES),
    )


@dataclass(frozen=True, slots=True)
class Windows:
    """The tokens that are looked at, in the order in which they are hashed: three int64[w]."""

    documents: Int64Array
    #: tokens of the document before the window.
    offsets: Int64Array
    #: tokens of the window, at least 1.
    counts: Int64Array

    @classmethod
    def choose(cls, documents: int, lengths: Callable[[Int64Array], Int64Array], places: int = PLACES) -> Windows:
        """The windows of a source.

        Args:
            documents: of the source.
            lengths: int64[n] document numbers to int64[n] tokens.
            places: windows at most, if no document is so short that it is read whole.
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
    """`scan_fingerprint`, with the hash of the sizes by which documents are grouped in place of their lengths'."""
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
    """The hash of a source that is read document by document.

    Args:
        documents, lengths, places: see `Windows.choose`.
        read: (document, offset, count) to its tokens.
        mapped: as ``map``, which calls ``read`` for all windows.
    """
    windows = Windows.choose(documents, lengths, places)
    columns = (windows.documents.tolist(), windows.offsets.tolist(), windows.counts.tolist())
    return hash_tokens(mapped(read, *columns))


def hash_tokens(windows: Iterable[npt.NDArray[Any]]) -> str:
    """The hash of all tokens of windows, as little-endian int64 or float64: xxh3_64, 16 hex digits."""
    hasher = xxhash.xxh3_64()
    for tokens in windows:
        hasher.update(np.ascontiguousarray(tokens, "<f8" if tokens.dtype.kind == "f" else "<i8").data)
    return hasher.hexdigest()


def _documents(documents: int, places: int) -> Int64Array:
    """A document in each of ``places`` equal ranges, in order; all, if there are no more than that."""
    if documents <= places:
        return np.arange(documents, dtype=np.int64)
    bounds = [k * documents // places for k in range(places + 1)]
    return np.array([low + _draw(documents, low) % (high - low) for low, high in pairwise(bounds)], np.int64)


def _within(document: int, length: int, each: int) -> list[tuple[int, int]]:
    """(offset, tokens) of the windows of a document: one in each of ``each`` equal ranges of it."""
    if length <= each * WINDOW:
        return [(0, length)] if length else []
    bounds = [k * length // each for k in range(each + 1)]
    return [(low + _draw(document, length, low) % (high - low - WINDOW + 1), WINDOW) for low, high in pairwise(bounds)]


def _draw(*numbers: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(numbers)}q", *numbers))
