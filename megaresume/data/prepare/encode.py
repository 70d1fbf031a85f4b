"""Blocks to parts: which of them have none yet; and encoding them, here or in worker processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.data.document_encoder import DocumentEncoder, EncoderSpec, checksum
from megaresume.data.documents import LeftOut, TextUnit, documents_of, places_of
from megaresume.data.inputs import InputFile
from megaresume.data.layout import MAX_SEQUENCE_TOKENS
from megaresume.data.prepare.blocks import Block, BlockReader, Stretch
from megaresume.data.prepare.parts import Part, PartFiles
from megaresume.data.prepare.work import disk_error, run
from megaresume.data.record_index import RowIndex
from megaresume.data.row_lines import NOT_ALONE
from megaresume.encoding.text.conversations import Conversation
from megaresume.stream.errors import CorpusError, UsageError
from megaresume.stream.progress import Progress, progress

#: documents that are left out of which a part says where they are.
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
    """All parts of some stretches by their names, in order, and how many of them were there already.

    Args:
        files: the input.
        text_unit: what a document is in a text file.
        size: bytes a block holds at least.
        stretches: what to make.
        encoder: makes a part.
        workers: processes.

    Raises:
        CorpusError: damaged input.
        SetupError: a part cannot be written, or a worker died.
    """
    parts: dict[str, Part] = {}
    made = 0
    with progress("tokenizing", sum(stretch.size for stretch in stretches), "B") as bar:
        work = (
            item
            for stretch in stretches
            for item in _blocks_to_do(BlockReader(files, text_unit, size, stretch.stop), stretch, encoder, parts, bar)
        )
        with closing(run(work, Encoder.encode, encoder, workers=workers)) as done:
            for name, part in done:
                parts[name] = part
                bar.update(part.raw_bytes)
                made += 1
    return dict(sorted(parts.items())), len(parts) - made


def _blocks_to_do(
    reader: BlockReader, stretch: Stretch, encoder: Encoder, parts: dict[str, Part], bar: Progress
) -> Iterator[tuple[str, Block]]:
    """Blocks that have no part yet; the parts that are there are added to ``parts``."""
    position, index = stretch.start, 0
    with closing(reader):
        while True:
            name = stretch.name(index)
            part = encoder.files.find_part(name)
            if part is not None:
                parts[name] = part
                position = part.end
                bar.update(part.raw_bytes)
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
    #: parts hold places, not tokens.
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
        """File, and place in it, of each document, also of those that are left out; None: nobody asked."""
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
