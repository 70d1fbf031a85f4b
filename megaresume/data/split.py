"""A text corpus, opened; and the part of it, or of any source, that ``--split 969,30,1`` selects.

A corpus is opened by its .bin through memory maps, or, without a .bin, from its raw files. The .bin is mapped when the
first token is read, so that a process that only plans holds no descriptor for it.

A split has the same train, valid and test ranges as Megatron's, as views of a source. Source of the arithmetic:
``parse_and_normalize_split``, ``convert_split_vector_to_split_matrix`` and ``_build_megatron_dataset_splits`` of
megatron-core (``blended_megatron_dataset_config.py`` and ``..._builder.py``), including the floating point: with a
range that differs by one document, it would be another corpus.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from megaresume.data.indexed_documents import REBUILD, IndexedDocuments
from megaresume.data.layout import bin_path, prefix_of
from megaresume.data.record_index import places_path
from megaresume.data.row_source import RowSource
from megaresume.data.sidecar import changed, map_file, opened_file
from megaresume.data.source import (
    BaseSource,
    DocumentSource,
    Source,
    TokenSource,
    Windows,
    hash_tokens,
    is_document_source,
    scan_fingerprint,
)
from megaresume.data.spans import Spans, spans_of
from megaresume.stream.arrays import Int64Array
from megaresume.stream.errors import ConfigError, CorpusError
from megaresume.stream.source import LongDocuments, find_long
from megaresume.stream.state import Fingerprint

if TYPE_CHECKING:
    from megaresume.encoding.images.document import EncodedDocument, Key
    from megaresume.encoding.images.encoder import ImageTextEncoder

Part = Literal["train", "valid", "test"]
PARTS = cast(tuple[Part, ...], get_args(Part))

# Megatron finds runs of digits and points, and ignores the rest, so that it reads "-5,1" as 5 and 1.
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_SPLIT = re.compile(rf"\s*{_NUMBER}(?:\s*[,;/\s]\s*{_NUMBER})*\s*")


def split_ranges(split: str, documents: int) -> dict[Part, tuple[int, int] | None]:
    """The documents [start, stop) of each part; None for a part whose share is 0.

    Args:
        split: shares of train, valid and test, in any unit: ``"969,30,1"``, ``"99,1"``, ``"100"``.
        documents: of the whole corpus.

    Raises:
        ConfigError: not one to three numbers, or all are 0.
    """
    numbers = re.findall(_NUMBER, split) if _SPLIT.fullmatch(split) else []
    if not 1 <= len(numbers) <= len(PARTS) or not any(float(n) > 0 for n in numbers):
        raise ConfigError(
            "bad split",
            found=repr(split),
            expected="shares of train, valid and test that are not all 0, for example 969,30,1",
            action="correct --split (or split in data.yaml)",
        )
    shares = np.zeros(len(PARTS))
    shares[: len(numbers)] = [float(n) for n in numbers]
    bounds = [0.0]
    for share in (shares / np.sum(shares)).tolist():
        bounds.append(bounds[-1] + share)
    ranges: dict[Part, tuple[int, int] | None] = {}
    for part, low, high in zip(PARTS, bounds[:-1], bounds[1:], strict=True):
        empty = high <= low
        ranges[part] = None if empty else (round(low * float(documents)), round(high * float(documents)))
    return ranges


def split_part(source: Source, split: str, part: Part) -> Source:
    """The part of a source, as a view.

    Raises:
        ConfigError: a bad split, or a part without documents (Megatron's own index build never returns there).
    """
    found = split_ranges(split, len(source))[part]
    if found is None or found[0] == found[1]:
        raise ConfigError(
            f"the {part} part of a source is empty",
            found=f"split {split} of {len(source)} documents",
            expected="at least one document",
            cause="the share is 0" if found is None else "the source is too small for this share",
            action=f"give '{part}' a larger share, or leave the source out of the {part} data",
        )
    return range_of(source, *found)


def range_of(source: Source, start: int, stop: int) -> RangeSource:
    """Documents start to stop of a source, as a view; zero-copy if the source is."""
    if isinstance(source, IndexedSource | TokenRangeSource):
        return TokenRangeSource(source, start, stop)
    if is_document_source(source):
        return DocumentRangeSource(source, start, stop)
    if hasattr(source, "places"):
        return PlacedRangeSource(source, start, stop)
    return RangeSource(source, start, stop)


class RangeSource(BaseSource):
    """Documents [start, stop) of another source, numbered from 0.

    Raises:
        ConfigError: the range is not within the source.
    """

    def __init__(self, source: Source, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= len(source):
            raise ConfigError(
                "a range of documents is outside its source",
                found=f"documents {start} to {stop}",
                expected=f"a range within 0 to {len(source)}",
                action="correct the range",
            )
        self.source = source
        self.start = start
        self.stop = stop

    @property
    def is_part(self) -> bool:
        """Whether the source has documents before or after it."""
        return (self.start, self.stop) != (0, len(self.source))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source!r}, {self.start}, {self.stop})"

    def __len__(self) -> int:
        """The number of documents."""
        return self.stop - self.start

    def length(self, i: int) -> int:
        """The number of tokens of document i."""
        return self.source.length(self._inner(i))

    def lengths(self, ids: Int64Array) -> Int64Array:
        """The tokens of each document: int64[n] to int64[n]."""
        return self.source.lengths(self._inner_ids(ids))

    def get(self, i: int) -> npt.NDArray[Any]:
        """The tokens of document i."""
        return self.source.get(self._inner(i))

    def read(self, i: int, offset: int, length: int) -> npt.NDArray[Any]:
        """`length` tokens of document i from token `offset` on."""
        return self.source.read(self._inner(i), offset, length)

    def trained_spans(self, ids: Int64Array) -> Spans | None:
        """Which tokens of each document are trained; None if the source does not say: all."""
        return spans_of(self.source, self._inner_ids(ids))

    def range_fingerprint(self, start: int, stop: int, *, recompute: bool = False) -> Fingerprint:
        """The fingerprint of documents start to stop of this range; documents appended after it do not change it."""
        own = getattr(self.source, "range_fingerprint", None)
        if own is not None:  # known without a scan, or cached
            found: Fingerprint = own(self.start + start, self.start + stop, recompute=recompute)
            return found
        if stop - start == len(self.source):
            return self.source.fingerprint(recompute=recompute)
        part = range_of(self, start, stop)
        tokenizer = self.source.fingerprint().tokenizer
        return scan_fingerprint(part.lengths, len(part), "fingerprint of a range", read=part.read, tokenizer=tokenizer)

    def long_documents(self, piece: int) -> LongDocuments:
        """The documents of the range that are longer than a piece of this many tokens."""
        whole = getattr(self.source, "long_documents", None)
        return find_long(self, piece) if whole is None else whole(piece).between(self.start, self.stop)

    def _inner(self, i: int) -> int:
        self._check_id(i)
        return self.start + i

    def _inner_ids(self, ids: Int64Array) -> Int64Array:
        ids = self._check_ids(ids)
        return ids + self.start if self.start else ids


class TokenRangeSource(RangeSource):
    """A `RangeSource` over a source whose tokens are in one array."""

    source: TokenSource

    @property
    def token_view(self) -> npt.NDArray[Any]:
        """All tokens of the whole source, not only of the range."""
        return self.source.token_view

    def token_starts(self, ids: Int64Array) -> Int64Array:
        """Where each document of the range starts in `token_view`, in tokens."""
        return self.source.token_starts(self._inner_ids(ids))


class PlacedRangeSource(RangeSource):
    """A `RangeSource` over a source that knows the places of its documents."""

    @property
    def files(self) -> Any:
        """The reader of its files."""
        return cast(Any, self.source).files

    def places(self, i: int) -> list[Any]:
        """The place of document i of the range; empty if the source does not say, or does not read it."""
        places = getattr(self.source, "places", None)
        return [] if places is None else list(places(self._inner(i)))


class DocumentRangeSource(PlacedRangeSource):
    """A `RangeSource` over a source of image-text documents."""

    source: DocumentSource

    @property
    def whole(self) -> bool:
        """Whether its documents must not be cut."""
        return self.source.whole

    @property
    def longest(self) -> int | None:
        """The number of tokens of the longest document of the whole source; None if unknown."""
        found: int | None = getattr(cast(Any, self.source), "longest", None)
        return found

    @property
    def encoder(self) -> ImageTextEncoder:
        """The encoder that makes its documents."""
        return self.source.encoder

    @property
    def levels(self) -> Any:
        """The levels of the whole source: see `megaresume.data.shard_source.ShardSource.levels`."""
        return getattr(self.source, "levels", None)

    def augmented(self, steps: object) -> DocumentRangeSource:
        """The same documents with these augmentation steps, if the source supports them."""
        augmented = getattr(self.source, "augmented", None)
        return self if augmented is None else DocumentRangeSource(augmented(steps), self.start, self.stop)

    def encoded(self, i: int, key: Key) -> EncodedDocument:
        """Document i of the range; ``key`` has its number in the range."""
        return self.source.encoded(self._inner(i), key)

    def record(self, i: int) -> Any:
        """Document i of the range as stored, if the source can tell."""
        return cast(Any, self.source).record(self._inner(i))

    def describe(self, i: int) -> dict[str, Any]:
        """The origin of document i of the range, if the source can tell: plain JSON."""
        found: dict[str, Any] = cast(Any, self.source).describe(self._inner(i))
        return found


class IndexedSource(IndexedDocuments):
    """Documents of a Megatron corpus; see `IndexedDocuments`.

    Raises:
        CorpusError: a file is missing, or damaged in a way that shows without a scan.
        SetupError: no permission, or too many open files.
    """

    suffix = ".bin"

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._token_view: npt.NDArray[Any] | None = None
        bin_, size, end = self.tokens_path, self._identity.bin.size, self._token_bytes
        if size != end:
            relation = "shorter" if size < end else "longer"
            raise CorpusError(
                f"{bin_} is {relation} than its index says",
                found=f"{size} bytes",
                expected=f"{end} bytes",
                cause="a copy was interrupted, or the .bin and the .idx are of two different builds",
                action=REBUILD,
            )

    @property
    def token_view(self) -> npt.NDArray[Any]:
        """All tokens, read-only and memory-mapped: shape (num_tokens,), dtype as stored.

        Raises:
            CorpusError: the .bin is gone, or is not the one that was there when the corpus was opened.
        """
        if self._token_view is None:
            path = self.tokens_path
            data, identity = map_file(path)
            if not identity.is_the_file(self._identity.bin):
                raise changed(path, identity, self._identity.bin)
            self._token_view = np.frombuffer(data, self.dtype)
        return self._token_view

    def token_starts(self, ids: Int64Array) -> Int64Array:
        """Where each document starts in `token_view`: int64[n] to int64[n], in tokens; 0 for an empty one.

        ``token_view[start : start + length]`` is within the view for every result.

        Raises:
            IndexError: an id is not in [0, len).
            CorpusError: the .idx is damaged at one of them, or its sequences do not follow each other.
        """
        from megaresume.data.kernels import document_starts

        ids = np.ascontiguousarray(ids, np.int64)
        out = np.empty(ids.shape, np.int64)
        bad = document_starts(
            ids,
            self._boundaries,
            self._lengths,
            self._pointers,
            self.dtype.itemsize.bit_length() - 1,
            self._token_bytes,
            out,
        )
        if bad >= 0:
            raise self._bad_document(int(ids[bad]))
        return out

    def read(self, i: int, offset: int, length: int) -> npt.NDArray[Any]:
        """`length` tokens of document i from token `offset` on: a read-only view, dtype as stored.

        Raises:
            IndexError: no such document, or the range leaves it.
            CorpusError: the corpus is damaged there.
        """
        self._check_range(i, offset, length)
        start = int(self.token_starts(np.array([i], np.int64))[0]) + offset
        return self.token_view[start : start + length]

    def _contents(self, start: int, stop: int) -> str:
        """Hash tokens by file reads instead of the map: a process that only plans keeps no descriptor of the .bin."""
        windows = Windows.choose(stop - start, lambda ids: self.lengths(start + ids))
        width = self.dtype.itemsize
        starts = (self.token_starts(start + windows.documents) + windows.offsets) * width
        with opened_file(self.tokens_path) as file:
            places = zip(starts.tolist(), (windows.counts * width).tolist(), strict=True)
            read = (os.pread(file.fileno(), size, at) for at, size in places)
            return hash_tokens(np.frombuffer(tokens, self.dtype) for tokens in read)


def open_corpus(path: str | Path, *, inputs: str | None = None) -> IndexedDocuments:
    """Open a text corpus: by its .bin, or, without one, from its raw files.

    Args:
        path: prefix of the corpus.
        inputs: directory or URL of the raw files, if it differs from the one in the index.

    Raises:
        CorpusError: it has both .bin and .places, and one of them does not belong to the .idx.
        CorpusError, SetupError: see `IndexedSource` and `RowSource`.
    """
    prefix = prefix_of(path)
    places, tokens = places_path(prefix), bin_path(prefix)
    if not places.is_file():
        return IndexedSource(prefix)
    if tokens.is_file():
        raise CorpusError(
            f"{prefix} has two kinds of tokens",
            found=f"{tokens.name} and {places.name}",
            expected="the one that belongs to the .idx: megaresume prepare removes the other",
            cause="a corpus that was copied over an older one, or was made by another program",
            action=f"delete the older of the two: ls -l {prefix}.*",
        )
    return RowSource(prefix, inputs=inputs)
