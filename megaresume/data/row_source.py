"""`RowSource`: rows of raw files as documents whose lengths are known and whose tokens are made when they are read.

raw files -- megaresume prepare --index-only --> .idx, .places -- data.yaml --> RowSource -- one row --> tokens

length(i)               .idx                                                          planning: no raw file is touched
read(i, offset, n)      .places -> row -> the functions of `prepare` -> exactly the tokens that the index was made of
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from megaresume.data.document_encoder import DocumentEncoder, EncoderSpec, MadeDocument, checksum, library_versions
from megaresume.data.documents import Piece, documents_of
from megaresume.data.files import changed, map_file
from megaresume.data.indexed_documents import IndexedDocuments, reopened
from megaresume.data.raw_files import RawFiles
from megaresume.data.record_index import RecordPlace, RowIndex
from megaresume.stream.errors import CorpusError, MegaresumeError

if TYPE_CHECKING:
    from megaresume.data.shard_files import Place, ShardFiles

#: tokens of the documents read last that are kept, by each process: neighbouring pieces of one are made once.
RECENT = 1 << 21


class RowSource(IndexedDocuments):
    """Documents of a corpus that ``megaresume prepare --index-only`` made: the same as of its .bin, if it had one.

    Args:
        path: prefix of the corpus.
        inputs: directory or URL of the raw files; None: where they were.

    Raises:
        CorpusError: a file of the index is missing or damaged.
        SetupError: no permission, or too many open files.
    """

    suffix = ".places"

    def __init__(self, path: str | Path, *, inputs: str | None = None) -> None:
        super().__init__(path)
        data, identity = map_file(self.tokens_path)
        if not identity.is_the_file(self._identity.bin):
            raise changed(self.tokens_path, identity, self._identity.bin)
        self._index = RowIndex(self.tokens_path, data, len(self))
        self._inputs = inputs
        self._recent: OrderedDict[int, npt.NDArray[Any]] = OrderedDict()
        self._recent_tokens = 0
        self._lock = Lock()
        #: a chat template is rendered by one thread at a time.
        self._making = Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return (reopened, (functools.partial(RowSource, inputs=self._inputs), self.prefix, self._identity))

    @functools.cached_property
    def raw_files(self) -> RawFiles:
        """Where the rows are."""
        return RawFiles(self._index, self._inputs, self._encoder.spec)

    @property
    def files(self) -> ShardFiles:
        """What reads them."""
        return self.raw_files.files

    @property
    def numbered(self) -> object:
        """What numbers the documents of its files: which rows are one, and how many there are in each file."""
        counts = [(file["unit"], file["records"]) for file in self._index.header["files"]]
        return counts, self._index.header["encoder"]["text"]

    @functools.cached_property
    def _encoder(self) -> DocumentEncoder:
        return DocumentEncoder(EncoderSpec.from_json(self._index.header["encoder"]))

    def read(self, i: int, offset: int, length: int) -> npt.NDArray[Any]:
        """`length` tokens of document i from token `offset` on: read-only, dtype as the index says.

        Raises:
            IndexError: no such document, or the range leaves it.
            CorpusError: its file is missing or changed, or its tokens are not those of the index.
            SetupError: the store does not answer, or there is no room to unpack a compressed file.
        """
        self._check_range(i, offset, length)
        with self._lock:
            tokens = self._recent.get(i)
        if tokens is None:
            tokens = self._made(i)
            tokens.flags.writeable = False
            self._keep(i, tokens)
        return tokens[offset : offset + length]

    def places(self, i: int) -> list[Place]:
        """Where the bytes of document i lie; nothing: they are not read by themselves, as those of Parquet."""
        place = self.raw_files.bytes_of(self._index.place(i))
        return [] if place is None else [place]

    def _contents(self, start: int, stop: int) -> str:
        self._index.verify()
        return super()._contents(start, stop)

    def _keep(self, i: int, tokens: npt.NDArray[Any]) -> None:
        with self._lock:
            if i not in self._recent:
                self._recent[i] = tokens
                self._recent_tokens += len(tokens)
            while self._recent_tokens > RECENT and len(self._recent) > 1:
                self._recent_tokens -= len(self._recent.popitem(last=False)[1])

    def _made(self, i: int) -> npt.NDArray[Any]:
        place = self._index.place(i)
        if self.files.cache is not None:
            with contextlib.suppress(CorpusError):  # the cache may have what a file was for a time
                return self._made_of(i, place, self.raw_files.read(place))
        return self._made_of(i, place, self.raw_files.read(place, again=self.files.cache is not None))

    def _made_of(self, i: int, place: RecordPlace, data: bytes) -> npt.NDArray[Any]:
        unit = self._index.header["files"][place.file]["unit"]
        if unit == "json":  # an element of an array may have several lines, of which `prepare` made one
            data = data.replace(b"\n", b" ").replace(b"\r", b" ")
        # Not line 0, whose first character may be a mark.
        piece = Piece(name=self.raw_files.path(place.file), unit=unit, line=1, data=data)
        try:
            documents = list(documents_of(piece, self._encoder.spec.text))
            with self._making:
                made = list(self._encoder.encode(documents))
        except MegaresumeError as error:
            raise self._other(i, place, error.headline) from error
        found = f"{len(made)} documents"
        if len(made) == 1:
            found = "a document that is left out"
            if isinstance(made[0], MadeDocument):
                tokens = made[0].tokens(self._encoder.spec.dtype)
                if len(tokens) == self.length(i) and checksum(tokens) == place.content:
                    return tokens
                found = f"{len(tokens)} tokens"
        raise self._other(i, place, found)

    def _other(self, i: int, place: RecordPlace, found: str) -> CorpusError:
        """A document that does not become the tokens that it became when the index was made."""
        now = library_versions()
        differ = [
            f"{name} {version}, with {now.get(name, 'none')} here"
            for name, version in self._index.header["made_with"].items()
            if now.get(name) != version
        ]
        libraries = f", or the index was made with {'; '.join(differ)}" if differ else ""
        return CorpusError(
            f"{self.raw_files.where(place)} does not give the tokens that the index has of it",
            found=found,
            expected=f"the {self.length(i)} tokens of document {i} of {self.prefix}",
            cause=f"the file was changed in place{libraries}",
            action="put the file back as it was"
            + (", or install these versions" if differ else "")
            + "; or make the index again (megaresume prepare --index-only --overwrite) for a new run",
        )
