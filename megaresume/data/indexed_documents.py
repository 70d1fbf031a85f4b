"""The index of a corpus: its documents and their lengths, wherever the tokens come from.

Opening takes the same time at any size: it checks the header and the ends of the arrays, and scans none. Everything in
between is checked when it is used, and all of it when the fingerprint is computed.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from megaresume.data import sidecar
from megaresume.data.layout import HEADER_BYTES, IndexHeader, idx_path, prefix_of
from megaresume.data.sidecar import CorpusIdentity, FileIdentity, changed, map_file
from megaresume.data.source import PLACES, BaseSource, contents_hash, scan_fingerprint
from megaresume.data.spans import SpanFile, Spans, check_is_prepared, check_needs_none, spans_path
from megaresume.stream.arrays import Int64Array
from megaresume.stream.errors import CorpusError
from megaresume.stream.progress import progress
from megaresume.stream.source import LongDocuments
from megaresume.stream.state import Fingerprint

#: documents read at a time.
AT_ONCE = 16
REBUILD = "copy the corpus again or rebuild it: megaresume prepare"


class IndexedDocuments(BaseSource):
    """Documents whose lengths are in an .idx. Safe to share between threads, to fork and to pickle (it is reopened).

    A document is all sequences between two boundaries in the .idx. (Megatron's ``GPTDataset`` treats every sequence as
    a document. For corpora with one sequence per document, which its ``preprocess_data.py`` writes unless it splits
    sentences, this makes no difference.)

    Args:
        path: common prefix of the files, or one of them.

    Raises:
        CorpusError: a file is missing, or damaged in a way that shows without a scan.
        SetupError: no permission, or too many open files.
    """

    #: the suffix of the file beside the .idx that determines the tokens.
    suffix: ClassVar[str]

    def __init__(self, path: str | Path) -> None:
        #: the path without .bin or .idx.
        self.prefix = prefix_of(path)
        idx = idx_path(self.prefix)
        self._look_at(idx)
        tokens = self._look_at(self.tokens_path)
        data, idx_identity = map_file(idx)
        self._map = data
        self._is_read_page_by_page = False
        self._identity = CorpusIdentity(idx=idx_identity, bin=FileIdentity.of(tokens))
        header = IndexHeader.unpack(bytes(data[:HEADER_BYTES]), idx, len(data))
        #: dtype of the tokens as stored.
        self.dtype = header.dtype
        self._documents = header.documents
        self._lengths: npt.NDArray[np.int32] = np.frombuffer(data, "<i4", header.sequences, header.lengths_at)
        self._pointers: Int64Array = np.frombuffer(data, "<i8", header.sequences, header.pointers_at)
        self._boundaries: Int64Array = np.frombuffer(data, "<i8", header.documents + 1, header.boundaries_at)
        #: the table of blocks that `document_lengths` fills.
        self._blocks: npt.NDArray[np.uint8] | None = None
        #: size of all tokens in bytes.
        self._token_bytes = self._check_ends()
        self._spans = self._open_spans()

    @property
    def _where(self) -> str:
        return f" in {self.prefix}"

    @property
    def tokens_path(self) -> Path:
        """The path of the file beside the .idx that determines the tokens."""
        return self.prefix.with_name(self.prefix.name + self.suffix)

    def _look_at(self, file: Path) -> os.stat_result:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
            found = file.stat()
            if stat.S_ISREG(found.st_mode):
                return found
        raise CorpusError(
            f"{file} is missing",
            found=f"no such file{_siblings(self.prefix)}",
            expected=f"a corpus is a {self.suffix} and an .idx of one name",
            cause="a wrong path, or a corpus that was not copied completely",
            action="check the path, or build the corpus: megaresume prepare",
        )

    @property
    def index_bytes(self) -> int:
        """Size of the .idx."""
        return self._identity.idx.size

    def read_page_by_page(self) -> None:
        """Make a look-up in the .idx read one page from the disk, rather than 128 KiB around it."""
        self._is_read_page_by_page = True
        self._advise("MADV_RANDOM")

    def _advise(self, how: str) -> None:
        if isinstance(self._map, mmap.mmap) and hasattr(mmap, how):
            self._map.madvise(getattr(mmap, how))

    @contextlib.contextmanager
    def _read_through(self) -> Iterator[None]:
        """Advise the kernel that the .idx is read from start to end."""
        if not self._is_read_page_by_page:
            yield
            return
        self._advise("MADV_NORMAL")
        try:
            yield
        finally:
            self._advise("MADV_RANDOM")

    def _check_ends(self) -> int:
        idx = idx_path(self.prefix)
        first, last = int(self._boundaries[0]), int(self._boundaries[-1])
        if first != 0 or last != len(self._lengths):
            raise CorpusError(
                f"{idx} has inconsistent document boundaries",
                found=f"documents from sequence {first} to {last}",
                expected=f"from sequence 0 to {len(self._lengths)}",
                cause="the counts in the header or the last entries are damaged, or the file was cut and padded",
                action=REBUILD,
            )
        end = 0
        if len(self._lengths):
            end = int(self._pointers[-1]) + int(self._lengths[-1]) * self.dtype.itemsize
            if self._pointers[0] != 0 or self._lengths[-1] < 0 or self._pointers[-1] < 0:
                raise CorpusError(
                    f"{idx} has inconsistent pointers",
                    found=f"the first sequence starts at byte {self._pointers[0]}, "
                    f"the last at byte {self._pointers[-1]} with {self._lengths[-1]} tokens",
                    expected="the first at byte 0, and no negative number",
                    cause="the file is damaged",
                    action=REBUILD,
                )
        return end

    def _open_spans(self) -> SpanFile | None:
        path = spans_path(self.prefix)
        known = self.tokenizer or {}
        if not path.exists():
            check_needs_none(path, known.get("spans_bytes"))
            return None
        data, identity = map_file(path)
        self._identity = replace(self._identity, spans=identity)
        found = SpanFile(path, data, documents=len(self), tokens=self.num_tokens)
        check_is_prepared(found, known.get("spans_hash"))
        return found

    def __reduce__(self) -> tuple[object, ...]:
        return (reopened, (type(self), self.prefix, self._identity))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.prefix)!r}: {self._documents} documents, {self.num_tokens} tokens)"

    def __len__(self) -> int:
        """The number of documents."""
        return self._documents

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the whole corpus, without a scan."""
        return self._token_bytes // self.dtype.itemsize

    def tokens_before(self, document: int) -> int:
        """The number of tokens of all documents before this one, without a scan; document in [0, len]."""
        sequence = int(self._boundaries[document])
        end = self._token_bytes if sequence == len(self._lengths) else int(self._pointers[sequence])
        return end // self.dtype.itemsize

    def lengths(self, ids: Int64Array) -> Int64Array:
        """Tokens of each document: int64[n] to int64[n], in any order, without holding the GIL.

        Raises:
            IndexError: an id is not in [0, len).
            CorpusError: the .idx is damaged at one of them.
        """
        from megaresume.data.kernels import document_lengths, unknown_blocks

        ids = np.ascontiguousarray(ids, np.int64)
        out = np.empty(ids.shape, np.int64)
        if self._blocks is None:
            self._blocks = unknown_blocks(len(self))
        bad = document_lengths(ids, self._boundaries, self._lengths, self._blocks, out)
        if bad >= 0:
            raise self._bad_document(int(ids[bad]))
        return out

    def trained_spans(self, ids: Int64Array) -> Spans | None:
        """Which tokens of each document are trained; None if the corpus has no .spans: all are.

        Raises:
            IndexError: an id is not in [0, len).
            CorpusError: the .spans is damaged at one of them.
        """
        if self._spans is None:
            return None
        return self._spans.of(self._check_ids(ids))

    @functools.cached_property
    def tokenizer(self) -> dict[str, Any] | None:
        """The tokenizer as `megaresume prepare` recorded it; None for a corpus built by another program."""
        known = sidecar.read_tokenizer(
            self.prefix, idx_bytes=self._identity.idx.size, bin_bytes=self._identity.bin.size
        )
        return None if known is None else dict(known)

    def range_fingerprint(self, start: int, stop: int, *, recompute: bool = False) -> Fingerprint:
        """The fingerprint of documents start to stop.

        The first time, this reads and checks the whole .idx, and the .spans if there is one, reads a few windows of
        tokens (see `megaresume.data.source`), and caches the result beside the corpus (see `megaresume.data.sidecar`).
        After that it is free while the files are unchanged. With many processes, let one compute it first.

        Args:
            start: first document.
            stop: one after the last.
            recompute: ignore the cache, and rewrite it.

        Raises:
            CorpusError: the .idx is damaged somewhere in the range, or a file changes while it is read.
        """
        identity = self._unchanged(self._identity)
        known = None if recompute else sidecar.read_fingerprint(self.prefix, identity, start, stop)
        if known is None:
            known = replace(self._scan(start, stop), contents=self._contents(start, stop))
            if self._spans is not None:
                self._spans.check(self.lengths)
                known = replace(known, trained=self._spans.hash(start, stop))
            if CorpusIdentity.of(self.prefix, self.suffix) != identity:
                raise changed(self.prefix)
            sidecar.write_fingerprint(self.prefix, identity, start, stop, known)
        tokenizer = self.tokenizer
        return replace(known, tokenizer=None if tokenizer is None else str(tokenizer["fingerprint"]))

    def _contents(self, start: int, stop: int) -> str:
        documents = stop - start
        # Each may be a request to a store.
        with (
            ThreadPoolExecutor(AT_ONCE) as pool,
            progress(f"contents of {self.prefix.name}", min(PLACES, documents), "documents") as advance,
        ):

            def read(i: int, offset: int, count: int) -> npt.NDArray[Any]:
                return self.read(start + i, offset, count)

            def mapped(*work: Any) -> Iterator[npt.NDArray[Any]]:
                for tokens in pool.map(*work):
                    advance(1)
                    yield tokens

            return contents_hash(documents, lambda ids: self.lengths(start + ids), read, mapped=mapped)

    def long_documents(self, piece: int) -> LongDocuments:
        """The documents longer than a piece of this many tokens; for a large corpus, cached beside it."""
        with self._read_through():
            return sidecar.kept_list(self, self.prefix, self._identity.idx, piece)

    def _unchanged(self, opened: CorpusIdentity) -> CorpusIdentity:
        """The files as they are now; they must be the ones that were opened.

        Raises:
            CorpusError: a file was removed or replaced.
        """
        try:
            now = CorpusIdentity.of(self.prefix, self.suffix)
        except FileNotFoundError as error:
            raise changed(Path(error.filename)) from error
        for path, found, before in (
            (idx_path(self.prefix), now.idx, opened.idx),
            (self.tokens_path, now.bin, opened.bin),
            (spans_path(self.prefix), now.spans, opened.spans),
        ):
            if found is not before and (found is None or before is None or not found.is_the_file(before)):
                raise changed(path, found, before)
        return now

    def _scan(self, start: int, stop: int) -> Fingerprint:
        from megaresume.data.kernels import scan_documents

        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"documents {start} to {stop} of {len(self)}")
        width, end = self.dtype.itemsize, self._token_bytes

        def checked(ids: Int64Array) -> Int64Array:
            out, first = np.empty(len(ids), np.int64), start + int(ids[0])
            bad = scan_documents(first, self._boundaries, self._lengths, self._pointers, width, end, out)
            if bad >= 0:
                raise self._bad_document(bad)
            return out

        with self._read_through():
            return scan_fingerprint(checked, stop - start, f"fingerprint of {self.prefix.name}")

    def _bad_document(self, i: int) -> IndexError | CorpusError:
        if not 0 <= i < len(self):
            return IndexError(f"document {i} of {len(self)}{self._where}")
        first, last = int(self._boundaries[i]), int(self._boundaries[i + 1])
        found = f"sequences {first} to {last}"
        if 0 <= first < last <= len(self._lengths):
            lengths = self._lengths[first : min(last, first + 4)].tolist()
            pointers = self._pointers[first : min(last, first + 4)].tolist()
            found += f", tokens {lengths}, at bytes {pointers} (the first 4 of each)"
        return CorpusError(
            f"{idx_path(self.prefix)} is damaged at document {i}",
            found=found,
            expected=f"boundaries within {len(self._lengths)} sequences, lengths that are not negative, sequences that "
            f"follow each other within {self._token_bytes} bytes of tokens",
            cause="a damaged disk or copy, or a program that does not write Megatron's format",
            action=REBUILD,
        )


def reopened(kind: Callable[[Path], IndexedDocuments], prefix: Path, identity: CorpusIdentity) -> IndexedDocuments:
    """Reopen a pickled corpus, unless another one has taken its place.

    Raises:
        CorpusError: it changed: a worker would plan or read something other than its parent.
    """
    source = kind(prefix)
    source._unchanged(identity)
    return source


def _siblings(prefix: Path) -> str:
    """Names close to a missing corpus, for an error."""
    import difflib

    if not prefix.parent.is_dir():
        return f", and no directory {prefix.parent}"
    names = sorted(p.stem for p in prefix.parent.glob("*.idx"))
    close = difflib.get_close_matches(prefix.name, names, n=3, cutoff=0.4) or names[:3]
    return f"; corpora in {prefix.parent}: {', '.join(close)}" if close else f", and no corpus in {prefix.parent}"
