"""One block to one part: what a worker process does.

Parts are finished blocks of a text corpus in the `WorkDirectory`, by names that `Stretch.name` gives. A part is a
line of JSON, then int32[documents] lengths; of conversations int32[documents] spans of each, and int32[spans, 2], as in
`megaresume.corpora.spans`; then the tokens, or, of an index alone, the `PLACE` of each document. It holds the position
in the input where the next block starts, so that finished blocks need not be read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.corpora.places import PLACE, checksum
from megaresume.corpora.prepare.arrow import NOT_ALONE
from megaresume.corpora.prepare.conversations.rows import Conversation
from megaresume.corpora.prepare.documents import Block, LeftOut, Position, documents_of, places_of
from megaresume.corpora.prepare.tokens import DocumentEncoder, EncoderSpec
from megaresume.corpora.prepare.workdir import WorkDirectory
from megaresume.stream.errors import CorpusError, SetupError, UsageError

#: documents that are left out of which a part says where they are.
SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One finished block."""

    documents: int
    tokens: int
    #: documents without a token, left out.
    empty: int
    #: documents that are not UTF-8, and lines that are no JSON object with a text: left out.
    skipped: int
    bad_lines: int
    #: where the first few of both are, and what is wrong with them.
    first_left_out: list[str]
    #: conversations that were too long: left out, and made shorter.
    too_long: int
    shortened: int
    #: spans of trained tokens, and these tokens; None: every token is trained.
    spans: int | None
    trained: int | None
    #: of the documents, UTF-8 bytes; of conversations, as the template writes them.
    text_bytes: int
    #: read for it from disk (about).
    raw_bytes: int
    #: where the next block starts.
    end: Position
    #: bytes of a token.
    token_bytes: int
    #: files of the input, by number, and documents of each; None: it holds tokens, not places.
    places: list[list[int]] | None
    #: xxh3_64 of the arrays, 16 hex digits.
    hash: str


@dataclass(frozen=True, slots=True)
class SpansOfPart:
    """Which tokens of the documents of a part are trained."""

    #: int32[documents], spans of each.
    counts: npt.NDArray[np.int32]
    #: int32[spans, 2], counted in their document.
    spans: npt.NDArray[np.int32]

    @classmethod
    def of(cls, spans: Sequence[Sequence[tuple[int, int]]]) -> SpansOfPart:
        """From those of each document."""
        flat = [span for document in spans for span in document]
        return cls(np.array([len(document) for document in spans], "<i4"), np.array(flat, "<i4").reshape(-1, 2))

    def sizes(self) -> dict[str, int]:
        """Fields of `Part`."""
        return {"spans": len(self.spans), "trained": int((self.spans[:, 1] - self.spans[:, 0]).sum(dtype=np.int64))}


class PartFiles(WorkDirectory):
    """The parts of one corpus."""

    def write_part(
        self,
        name: str,
        lengths: npt.NDArray[np.int32],
        tokens: npt.NDArray[Any],
        spans: SpansOfPart | None,
        *,
        end: Position,
        places: list[list[int]] | None = None,
        **counts: Any,
    ) -> Part:
        """Write a part: all of it or nothing.

        Args:
            name: of the block.
            lengths: tokens of each document, int32[documents].
            tokens: of all documents, in the type of the corpus; or their `PLACE`, if ``places`` are given.
            spans: of conversations, which tokens are trained.
            end: where the next block starts.
            places: as in `Part`.
            counts: the other fields of `Part`.

        Raises:
            OSError: it cannot be written.
        """
        sizes = {"documents": len(lengths), "tokens": int(lengths.sum(dtype=np.int64)), "places": places, **counts}
        sizes |= {"spans": None, "trained": None} if spans is None else spans.sizes()
        arrays = (lengths, tokens) if spans is None else (lengths, spans.counts, spans.spans, tokens)
        found = self.write(name, {**sizes, "end": asdict(end)}, arrays)
        return Part(**sizes, end=end, hash=found)

    def find_part(self, name: str) -> Part | None:
        """A part if it is finished; a damaged one is removed."""
        head = self.find(name, _body_bytes)
        return None if head is None else _part(head)

    def read_part(self, name: str) -> tuple[npt.NDArray[np.int32], SpansOfPart | None, bytes]:
        """Lengths, spans and tokens of a finished part; or lengths, spans and places.

        Raises:
            CorpusError: it is damaged; it is removed, so that a rerun makes it again.
        """
        head, body = self.read(name)
        documents, spans = head["documents"], head["spans"]
        lengths = np.frombuffer(body, "<i4", documents)
        if spans is None:
            return lengths, None, body[4 * documents :]
        counts = np.frombuffer(body, "<i4", documents, 4 * documents)
        pairs = np.frombuffer(body, "<i4", 2 * spans, 8 * documents).reshape(-1, 2)
        return lengths, SpansOfPart(counts, pairs), body[8 * documents + 8 * spans :]


def _part(head: Mapping[str, Any]) -> Part:
    return Part(**{**head, "end": Position(**head["end"])})


def _body_bytes(head: Mapping[str, Any]) -> int:
    part = _part(head)
    spans = 0 if part.spans is None else 4 * part.documents + 8 * part.spans
    rest = part.token_bytes * part.tokens if part.places is None else PLACE.itemsize * part.documents
    return 4 * part.documents + spans + rest


#: texts tokenized at once.
BATCH = 512
MAX_TOKENS = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSpec:
    """What a worker needs to know to make parts."""

    #: of the corpus.
    prefix: Path
    encoder: EncoderSpec
    #: parts hold places, not tokens.
    index_only: bool = False


class Encoder:
    """Encodes blocks."""

    def __init__(self, spec: BlockSpec) -> None:
        self._spec = spec
        self._files = PartFiles(spec.prefix)
        self._documents = DocumentEncoder(spec.encoder)

    def encode(self, name: str, block: Block) -> Part:
        """Write the part of a block.

        Raises:
            CorpusError: the input is damaged, or a document has too many tokens.
            SetupError: the part cannot be written.
        """
        dtype = self._spec.encoder.dtype
        arrays: list[npt.NDArray[Any]] = []
        lengths: list[int] = []
        spans: list[list[tuple[int, int]]] = []
        places: list[tuple[int, int, int, int]] = []
        counts = dict.fromkeys(("empty", "text_bytes", "too_long", "shortened"), 0)
        omitted: list[LeftOut] = []
        made_of = chain.from_iterable(map(self._documents.encode, self._batches(block)))
        for made, place in zip(made_of, self._places(block), strict=False):
            if isinstance(made, LeftOut):
                omitted.append(made)
            elif isinstance(made, str):
                counts[made] += 1
            else:
                lengths.append(sum(map(len, made.arrays)))
                counts["text_bytes"] += made.text_bytes
                counts["shortened"] += made.shortened
                if made.spans is not None:
                    spans.append(made.spans)
                if place is None:
                    arrays += made.arrays
                else:
                    places.append((*place, checksum(made.tokens(dtype))))
        if lengths and max(lengths) > MAX_TOKENS:
            raise CorpusError(
                f"a document of {block.pieces[0].name} has too many tokens",
                found=f"{max(lengths)} tokens",
                expected=f"at most {MAX_TOKENS}: Megatron's index holds lengths as int32",
                action="cut the document",
            )
        body = np.array([place[1:] for place in places], PLACE)
        if not self._spec.index_only:
            body = np.concatenate(arrays, dtype=dtype, casting="unsafe") if arrays else np.zeros(0, dtype)
        try:
            return self._files.write_part(
                name,
                np.array(lengths, "<i4"),
                body,
                None if self._spec.encoder.text.conversations is None else SpansOfPart.of(spans),
                places=_runs([place[0] for place in places]) if self._spec.index_only else None,
                token_bytes=np.dtype(dtype).itemsize,
                skipped=sum(entry.option == "invalid" for entry in omitted),
                bad_lines=sum(entry.option == "bad_lines" for entry in omitted),
                first_left_out=[entry.why for entry in omitted[:SHOWN]],
                raw_bytes=block.raw_bytes,
                end=block.end,
                **counts,
            )
        except OSError as error:
            raise disk_error(self._files.directory, error) from error

    def _batches(self, block: Block) -> Iterator[list[str | Conversation | LeftOut]]:
        batch: list[str | Conversation | LeftOut] = []
        for piece in block.pieces:
            for document in documents_of(piece, self._spec.encoder.text):
                batch.append(document)
                if len(batch) == BATCH:
                    yield batch
                    batch = []
        yield batch

    def _places(self, block: Block) -> Iterator[tuple[int, int, int] | None]:
        """File, and place in it, of each document, also of those that are left out; None: nobody asked."""
        if not self._spec.index_only:
            yield from repeat(None)
        for piece in block.pieces:
            for at, extent in places_of(piece):
                if at == NOT_ALONE:
                    raise UsageError(
                        f"{piece.name} has columns that are dictionaries",
                        found="record batches that cannot be read one by one",
                        expected="columns of plain values, for --index-only",
                        action="prepare it without --index-only, or write it as Parquet",
                    )
                yield piece.file, at, extent


def _runs(files: Sequence[int]) -> list[list[int]]:
    """Each number that is there, and how often."""
    return [[file, len(list(same))] for file, same in groupby(files)]


def disk_error(path: Path, error: OSError) -> SetupError:
    """For what cannot be written."""
    full = error.errno in (28, 122)  # ENOSPC, EDQUOT
    return SetupError(
        f"{path} cannot be written",
        found=error.strerror or str(error),
        expected="room for about twice the size of the corpus, until it is complete"
        if full
        else "a writable directory",
        cause="the disk or the quota is full" if full else None,
        action="free some space and run the same command again: it continues where it stopped"
        if full
        else "check the permissions of the directory, or give another --output",
    )


_encoder: Encoder | None = None
_spec: BlockSpec | None = None


def start_worker(spec: BlockSpec) -> None:
    """Initialise a worker process; the tokenizer is built with the first block."""
    global _spec
    _spec = spec


def encode_in_worker(name: str, block: Block) -> Part:
    """`Encoder.encode` in a process that `start_worker` initialised."""
    global _encoder
    if _encoder is None:
        if _spec is None:
            raise RuntimeError("start_worker was not called in this process")
        _encoder = Encoder(_spec)
    return _encoder.encode(name, block)
