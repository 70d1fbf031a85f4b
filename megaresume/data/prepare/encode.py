"""Encodes blocks into parts, here or in workers; and merges parts into .bin (or .places), .idx and .spans.

A part is a finished block in the `WorkDirectory`, with a name from `Stretch.name`. Its arrays:

    lengths                   int32[documents]
    tokens                    in the dtype of the corpus; or, without a .bin, the columns of a `RowIndex`
    span_counts, spans        of conversations: int32[documents], and int32[spans, 2] as in `megaresume.data.spans`

It has the position of the next block in the input, so that finished blocks need not be read again.

Merging uses bounded memory. The .idx appears last, when its .bin or .places is complete.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.data.documents import DocumentEncoder, EncoderSpec, LeftOut, TextUnit, checksum, documents_of, places_of
from megaresume.data.inputs import InputFile
from megaresume.data.layout import MAX_SEQUENCE_TOKENS, IdxWriter, bin_path, idx_path
from megaresume.data.prepare.blocks import Block, BlockReader, Position, Stretch
from megaresume.data.prepare.work import WorkDirectory, disk_error, run
from megaresume.data.record_index import IndexWriter, RowIndex, places_path
from megaresume.data.row_lines import NOT_ALONE
from megaresume.data.sidecar import sidecar_path, write_tokenizer
from megaresume.data.spans import SpansWriter, spans_path
from megaresume.encoding.text.conversations import Conversation
from megaresume.files import fsync_dir
from megaresume.stream.errors import CorpusError, UsageError
from megaresume.stream.progress import Progress, progress

#: documents left out that a part lists by name.
SHOWN = 3
#: texts tokenized at once.
BATCH = 512


def make_parts(
    files: Sequence[InputFile],
    text_unit: TextUnit,
    size: int,
    stretches: Sequence[Stretch],
    encoder: Encoder,
    workers: int,
) -> tuple[dict[str, Part], int]:
    """Make the parts of stretches; returns them by name, in order, and how many existed already.

    Args:
        files: the input.
        text_unit: what a document is in a text file.
        size: least bytes of a block.
        stretches: those to make.
        encoder: makes a part.
        workers: processes.

    Raises:
        CorpusError: damaged input.
        SetupError: a part cannot be written, or a worker died.
    """
    parts: dict[str, Part] = {}
    made = 0
    with progress("tokenizing", sum(stretch.size for stretch in stretches), "B") as advance:
        work = (
            item
            for stretch in stretches
            for item in _blocks_to_do(
                BlockReader(files, text_unit, size, stretch.stop), stretch, encoder, parts, advance
            )
        )
        with closing(run(work, Encoder.encode, encoder, workers=workers)) as done:
            for name, part in done:
                parts[name] = part
                advance(part.raw_bytes)
                made += 1
    return dict(sorted(parts.items())), len(parts) - made


def _blocks_to_do(
    reader: BlockReader, stretch: Stretch, encoder: Encoder, parts: dict[str, Part], advance: Progress
) -> Iterator[tuple[str, Block]]:
    """Blocks without a part yet; existing parts are added to ``parts``."""
    position, index = stretch.start, 0
    with closing(reader):
        while True:
            name = stretch.name(index)
            part = encoder.files.find_part(name)
            if part is not None:
                parts[name] = part
                position = part.end
                advance(part.raw_bytes)
            else:
                block = reader.read(position if index else reader.with_line(position))
                if block is None:
                    return
                position = block.end
                yield name, block
            index += 1


@dataclass(frozen=True)
class Encoder:
    """Encodes blocks. It is sent to the worker processes, each of which builds a tokenizer with its first block."""

    files: PartFiles
    spec: EncoderSpec
    #: parts hold places instead of tokens.
    index_only: bool = False

    @cached_property
    def _documents(self) -> DocumentEncoder:
        return DocumentEncoder(self.spec)

    def encode(self, name: str, block: Block) -> tuple[str, Part]:
        """Write the part of a block.

        Raises:
            CorpusError: the input is damaged, or a document has too many tokens.
            SetupError: the part cannot be written.
        """
        dtype = self.spec.dtype
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
        if lengths and max(lengths) > MAX_SEQUENCE_TOKENS:
            raise CorpusError(
                f"a document of {block.pieces[0].name} has too many tokens",
                found=f"{max(lengths)} tokens",
                expected=f"at most {MAX_SEQUENCE_TOKENS}: Megatron's index holds lengths as int32",
                action="cut the document",
            )
        in_files = Counter(place[0] for place in places)
        body: dict[str, npt.NDArray[Any]] = {"lengths": np.array(lengths, "<i4")}
        if self.index_only:
            table = np.array([place[1:] for place in places], np.int64).reshape(-1, len(RowIndex.COLUMNS))
            body |= {name: table[:, k].astype(kind) for k, (name, kind) in enumerate(RowIndex.COLUMNS.items())}
        else:
            tokens = np.concatenate(arrays, dtype=dtype, casting="unsafe") if arrays else np.zeros(0, dtype)
            body["tokens"] = tokens
        if self.spec.text.conversations is not None:
            body["span_counts"] = np.array([len(document) for document in spans], "<i4")
            body["spans"] = np.array(list(chain.from_iterable(spans)), "<i4").reshape(-1, 2)
        try:
            part = self.files.write_part(
                name,
                body,
                places=[list(run) for run in in_files.items()] if self.index_only else None,
                skipped=sum(entry.option == "invalid" for entry in omitted),
                bad_lines=sum(entry.option == "bad_lines" for entry in omitted),
                first_left_out=[entry.why for entry in omitted[:SHOWN]],
                raw_bytes=block.raw_bytes,
                end=block.end,
                **counts,
            )
        except OSError as error:
            raise disk_error(self.files.directory, error) from error
        return name, part

    def _batches(self, block: Block) -> Iterator[list[str | Conversation | LeftOut]]:
        batch: list[str | Conversation | LeftOut] = []
        for piece in block.pieces:
            for document in documents_of(piece, self.spec.text):
                batch.append(document)
                if len(batch) == BATCH:
                    yield batch
                    batch = []
        yield batch

    def _places(self, block: Block) -> Iterator[tuple[int, int, int] | None]:
        """File and place of each document, including those that are left out; None without ``index_only``."""
        if not self.index_only:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A finished block."""

    documents: int
    tokens: int
    #: documents without tokens, left out.
    empty: int
    #: documents that are not UTF-8, and lines that are not a JSON object with a text: left out.
    skipped: int
    bad_lines: int
    #: the first few of both: where they are, and what is wrong with them.
    first_left_out: list[str]
    #: conversations that were too long: left out, and shortened.
    too_long: int
    shortened: int
    #: spans of trained tokens, and their tokens; None if every token is trained.
    spans: int | None
    trained: int | None
    #: UTF-8 bytes of the documents; for conversations, as rendered by the template.
    text_bytes: int
    #: approximate number of bytes read from disk for it.
    raw_bytes: int
    #: the start of the next block.
    end: Position
    #: numbers of input files, with the documents of each; None if it has tokens, not places.
    places: list[list[int]] | None


class PartFiles(WorkDirectory):
    """The parts of one corpus."""

    def write_part(
        self,
        name: str,
        arrays: Mapping[str, npt.NDArray[Any]],
        *,
        end: Position,
        places: list[list[int]] | None = None,
        **counts: Any,
    ) -> Part:
        """Write a part, atomically.

        Args:
            name: of the block.
            arrays: see above.
            end: the start of the next block.
            places: as in `Part`.
            counts: the other fields of `Part`.

        Raises:
            OSError: it cannot be written.
        """
        lengths, spans = arrays["lengths"], arrays.get("spans")
        sizes = {
            "documents": len(lengths),
            "tokens": int(lengths.sum(dtype=np.int64)),
            "spans": None if spans is None else len(spans),
            "trained": None if spans is None else int((spans[:, 1] - spans[:, 0]).sum(dtype=np.int64)),
            "places": places,
            **counts,
        }
        self.write(name, {**sizes, "end": asdict(end)}, arrays)
        return Part(**sizes, end=end)

    def find_part(self, name: str) -> Part | None:
        """A part, if it is finished; a damaged one is removed."""
        if (head := self.find(name)) is None:
            return None
        try:
            said = {field.name: head[field.name] for field in fields(Part)}
            return Part(**said | {"end": Position(**head["end"])})
        except (KeyError, TypeError):
            self.path(name).unlink()
            return None


def merge_parts(
    prefix: Path,
    files: PartFiles,
    parts: Mapping[str, Part],
    dtype: str,
    tokenizer: Mapping[str, Any],
    tick: Progress,
    *,
    raw: Mapping[str, Any] | None = None,
) -> None:
    """Write the corpus, replacing an older one.

    Args:
        prefix: of the corpus.
        files: the directory of the parts.
        parts: all of them by name, in order.
        dtype: of the tokens.
        tokenizer: for the sidecar.
        tick: called with the number of documents written.
        raw: the header of a .places, whose ``files`` lack the numbers of records; None to write a .bin.

    Raises:
        CorpusError: a part is damaged.
        OSError: such as a full disk.
    """
    documents = sum(part.documents for part in parts.values())
    counts = [part.spans for part in parts.values()]
    spans = None if None in counts else sum(count or 0 for count in counts)
    tokens_path = bin_path(prefix) if raw is None else places_path(prefix)
    paths = tokens_path, idx_path(prefix), spans_path(prefix)
    tokens_new, idx_new, spans_new = (path.with_name(f".{path.name}.new") for path in paths)
    spans_hash: str | None = None
    with open(tokens_new, "wb") as tokens_file, open(idx_new, "wb") as idx_file, ExitStack() as more:
        spans_file = None if spans is None else more.enter_context(open(spans_new, "w+b"))
        idx = IdxWriter(idx_file, dtype=np.dtype(dtype), documents=documents)
        writer = None if spans_file is None else SpansWriter(spans_file, documents=documents, spans=spans or 0)
        places = None if raw is None else IndexWriter(tokens_file, RowIndex, documents)
        for name in parts:
            arrays = files.read(name)[1]
            idx.add(arrays["lengths"])
            if writer is not None:
                writer.add(arrays["span_counts"], arrays["spans"])
            if places is None:
                tokens_file.write(arrays["tokens"].data)
            else:
                places.add(arrays)
            tick(len(arrays["lengths"]))
        idx.finish()
        if places is not None and raw is not None:
            places.finish({**raw, "files": _counted(raw["files"], parts)})
        if writer is not None:
            spans_hash = writer.finish(idx.tokens)
        for file in (tokens_file, idx_file, spans_file):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
    # An index must never be beside the tokens or the spans of another corpus.
    idx_path(prefix).unlink(missing_ok=True)
    sidecar_path(prefix).unlink(missing_ok=True)
    spans_path(prefix).unlink(missing_ok=True)
    (places_path(prefix) if raw is None else bin_path(prefix)).unlink(missing_ok=True)
    os.replace(tokens_new, tokens_path)
    spans_bytes = None if spans is None else spans_new.stat().st_size
    idx_bytes = idx_new.stat().st_size
    bin_bytes = tokens_path.stat().st_size
    write_tokenizer(
        prefix, tokenizer, idx_bytes=idx_bytes, bin_bytes=bin_bytes, spans_bytes=spans_bytes, spans_hash=spans_hash
    )
    if spans is not None:
        os.replace(spans_new, spans_path(prefix))
    os.replace(idx_new, idx_path(prefix))
    fsync_dir(prefix.parent)


def _counted(files: Sequence[Mapping[str, Any]], parts: Mapping[str, Part]) -> list[dict[str, Any]]:
    """Files with the number of records of each."""
    documents = Counter[int]()
    for part in parts.values():
        for file, count in part.places or []:
            documents[file] += count
    return [{**said, "records": documents[number]} for number, said in enumerate(files)]
