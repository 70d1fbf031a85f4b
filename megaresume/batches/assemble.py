"""`Assembler`: from what samples hold to arrays of tokens. Stateless: the same plan gives the same bytes anywhere.

Compiled loops lay out and write whole batches, without holding the GIL.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from megaresume.batches.cold import ColdPages
from megaresume.batches.documents import DocumentReader, Images
from megaresume.batches.pairs import find_pairs, refuse_pairs, separate
from megaresume.corpora.base import Source, TokenSource, is_document_source
from megaresume.corpora.spans import has_pairs, has_spans, spans_of
from megaresume.stream.compiled import compiled
from megaresume.stream.errors import UsageError
from megaresume.stream.planning.kernel import DOCUMENT, LENGTH, OFFSET, SOURCE
from megaresume.stream.planning.plan import Plan


@compiled
def lay_out(table, starts, align, seq_length, rows, columns, bounds, num_bounds, order, num_of_source):  # type: ignore[no-untyped-def]
    """Where each segment of a plan goes, and where attention must not look across.

    Args:
        table, starts: of the `Plan`: int64[n, SEGMENT_WIDTH], int64[m + 1].
        align: tokens that a segment's place is a multiple of.
        seq_length: S.
        rows, columns: int64[n], written.
        bounds: int32[n + 2 * m], written: for each sample the starts of its segments, that of the padding after
            them if any, and S.
        num_bounds: int64[m], written: how many of ``bounds`` are each sample's.
        order: int64[n], written: the segments grouped by source.
        num_of_source: int64[sources], zeros; written: segments of each source.

    Returns:
        How many of ``bounds`` were written.
    """
    written = 0
    for row in range(starts.size - 1):
        column = 0
        before = written
        for k in range(starts[row], starts[row + 1]):
            rows[k], columns[k] = row, column
            bounds[written] = column
            written += 1
            end = column + table[k, LENGTH]
            column = -(-end // align) * align
        if column < seq_length:  # also the padding begins at a multiple: kernels for packed attention count on it
            bounds[written] = column
            written += 1
        bounds[written] = seq_length
        written += 1
        num_bounds[row] = written - before
    for k in range(table.shape[0]):
        num_of_source[table[k, SOURCE]] += 1
    place = np.cumsum(num_of_source) - num_of_source
    for k in range(table.shape[0]):
        source = table[k, SOURCE]
        order[place[source]] = k
        place[source] += 1
    return written


@compiled
def copy_segments(  # type: ignore[no-untyped-def]
    stored, document_starts, document_lengths, which, table, rows, columns, tokens, labels, loss_mask
):
    """Copy the segments of one source into their places.

    The label of a token is the next token of its document; the last token of a document has none.

    Args:
        stored: [tokens of the corpus], any integer dtype.
        document_starts, document_lengths: int64[k], where each segment's document lies in ``stored``, in tokens.
        which: int64[k], rows of ``table`` that are of this source.
        table: int64[n, SEGMENT_WIDTH], all segments of the batch. rows, columns: int64[n], where they go.
        tokens, labels: int64[m, S]. loss_mask: float32[m, S]. Labels and loss mask may be empty: they are left out.
    """
    for j in range(which.size):
        k = which[j]
        offset, length = table[k, OFFSET], table[k, LENGTH]
        first = document_starts[j] + offset
        source = stored[first : first + length]
        row, column = rows[k], columns[k]
        goes_on = offset + length < document_lengths[j]
        to_tokens = tokens[row, column : column + length]
        for i in range(length):
            to_tokens[i] = source[i]
        if labels.size:
            to_labels = labels[row, column : column + length]
            for i in range(length - 1):
                to_labels[i] = source[i + 1]
            to_labels[length - 1] = stored[first + length] if goes_on else 0
        if loss_mask.size:
            to_mask = loss_mask[row, column : column + length]
            for i in range(length):
                to_mask[i] = 1
            if not goes_on:
                to_mask[length - 1] = 0


@compiled
def mask_segments(starts, spans, which, table, rows, columns, loss_mask):  # type: ignore[no-untyped-def]
    """Take the loss away where the label is not trained.

    Args:
        starts, spans: int64[k + 1], int32[s, 2]: of each segment's document, as in `Spans`.
        which, table, rows, columns: as for `copy_segments`.
        loss_mask: float32[m, S], written: at place i of a segment stands the loss of its token i + 1.
    """
    for j in range(which.size):
        k = which[j]
        first, length = table[k, OFFSET] + 1, table[k, LENGTH]
        to_mask = loss_mask[rows[k], columns[k] : columns[k] + length]
        done = np.int64(0)
        for s in range(starts[j], starts[j + 1]):
            for i in range(done, min(np.int64(spans[s, 0]) - first, length)):
                to_mask[i] = 0
            done = max(done, np.int64(spans[s, 1]) - first)
        for i in range(done, length):
            to_mask[i] = 0


@compiled
def finish_rows(starts, columns, table, align, pad_id, tokens, labels, loss_mask, position_ids):  # type: ignore[no-untyped-def]
    """Write padding and position ids; positions start again at every segment, and at the padding at the end.

    Args:
        starts: int64[m + 1], the segments of each row. columns: int64[n], where each lies. table: of the `Plan`.
        align: tokens that a segment's place is a multiple of.
        pad_id: token written where there is no document.
        tokens, labels, position_ids: int64[m, S]. loss_mask: float32[m, S]. All but the tokens may be empty.
    """
    seq_length = tokens.shape[1]
    for row in range(tokens.shape[0]):
        written = end = 0
        for k in range(starts[row], starts[row + 1]):
            # Padding up to an aligned column belongs to the segment before it.
            _pad(row, written, columns[k], pad_id, tokens, labels, loss_mask)
            written = columns[k] + table[k, LENGTH]
            end = columns[k] + -(-table[k, LENGTH] // align) * align
            if position_ids.size:
                _count(position_ids[row, columns[k] : end])
        _pad(row, written, seq_length, pad_id, tokens, labels, loss_mask)
        if position_ids.size:
            _count(position_ids[row, end:])


@compiled
def _count(out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = i


@compiled
def _pad(row, start, stop, pad_id, tokens, labels, loss_mask):  # type: ignore[no-untyped-def]
    for i in range(start, stop):
        tokens[row, i] = pad_id
    if labels.size:
        labels[row, start:stop] = 0
    if loss_mask.size:
        loss_mask[row, start:stop] = 0


Int64Array = npt.NDArray[np.int64]


#: Fields of a batch that a loop can do without.
Field = Literal["labels", "loss_mask", "position_ids", "pairs"]
FIELDS: tuple[Field, ...] = ("labels", "loss_mask", "position_ids")
#: and one that a loop has to ask for.
PAIRS: Field = "pairs"


def check_fields(fields: Collection[str]) -> None:
    """Raise a UsageError for a field that there is none of."""
    if isinstance(fields, str) or not {*fields} <= {*FIELDS, PAIRS}:
        raise UsageError(
            "no such field of a batch",
            found=f"fields={fields!r}",
            expected=f"some of {', '.join((*FIELDS, PAIRS))}, or none: () gives tokens and cu_seqlens alone",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """A batch of m samples of S tokens, before torch. Those that nobody asked for are empty: [0, 0]."""

    #: int64[m, S].
    tokens: Int64Array
    #: int64[m, S]: the next token of the same document; 0 where there is none.
    labels: Int64Array
    #: float32[m, S]: 1 where the label counts: never at the last token of a document, never at padding; only where the
    #: spans of a corpus, or the template of image-text documents, say so.
    loss_mask: npt.NDArray[np.float32]
    #: int64[m, S]: from 0 in every segment.
    position_ids: Int64Array

    @classmethod
    def empty(cls, num_samples: int, seq_length: int, fields: Collection[Field] = FIELDS) -> Arrays:
        """Not initialised: the tokens, and these fields."""
        shape = (num_samples, seq_length)
        return cls(
            tokens=np.empty(shape, np.int64),
            labels=np.empty(shape if "labels" in fields else (0, 0), np.int64),
            loss_mask=np.empty(shape if "loss_mask" in fields else (0, 0), np.float32),
            position_ids=np.empty(shape if "position_ids" in fields else (0, 0), np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the n segments of m samples go."""

    #: int64[n], in samples from the first of the batch.
    rows: Int64Array
    #: int64[n], in tokens.
    columns: Int64Array
    #: int32[sum of num_bounds]: of each sample the starts of its segments, of the padding after them if any, and S.
    bounds: npt.NDArray[np.int32]
    #: int64[m].
    num_bounds: Int64Array
    #: int64[n]: the segments grouped by source.
    order: Int64Array
    #: int64[sources]: segments of each source.
    num_of_source: Int64Array


class Assembler:
    """Reads the tokens of planned samples.

    Args:
        sources: in the order of the stream's config.
        seq_length: tokens a sample.
        align: tokens that a segment's place is a multiple of (``packing.align``).
        pad_id: token written where there is no document.
        seed, names: of the stream and of its sources, which randomness in image-text documents is keyed by; needed
            where there are such. Errors name sources by them.
        cold: is told what is read.

    Raises:
        ConfigError: image sources that do not go together.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seq_length: int,
        align: int = 1,
        pad_id: int = 0,
        seed: int | None = None,
        names: Sequence[str] = (),
        cold: ColdPages | None = None,
    ) -> None:
        self.sources = list(sources)
        self.seq_length = seq_length
        self.align = align
        self.pad_id = pad_id
        self._names = list(names)
        self._cold = cold
        self._in_one_array: dict[int, bool] = {}
        #: sources that say which of their tokens are trained, by number.
        self.masked = [i for i, source in enumerate(self.sources) if has_spans(source)]
        #: of these, those that begin with a preference pair.
        self._pairs = [self.name_of(i) for i in self.masked if has_pairs(self.sources[i])]
        with_images = {i: s for i, s in enumerate(self.sources) if is_document_source(s)}
        #: reads image-text documents; None where the blend has none.
        self.documents: DocumentReader | None = None
        if with_images:
            assert seed is not None and len(names) == len(self.sources), "images need the seed and names of the stream"
            self.documents = DocumentReader(with_images, names=names, seed=seed)

    def name_of(self, i: int) -> str:
        """Of a source, for people."""
        return f"'{self._names[i]}'" if self._names else f"source {i}"

    def lay_out(self, plan: Plan) -> Layout:
        """Where the segments of a plan go."""
        num_segments, num_samples = len(plan.table), len(plan)
        rows, columns, order = np.empty((3, num_segments), np.int64)
        bounds, num_bounds = np.empty(num_segments + 2 * num_samples, np.int32), np.empty(num_samples, np.int64)
        num_of_source = np.zeros(len(self.sources), np.int64)
        written = lay_out(
            plan.table,
            plan.starts,
            self.align,
            self.seq_length,
            rows,
            columns,
            bounds,
            num_bounds,
            order,
            num_of_source,
        )
        return Layout(
            rows=rows,
            columns=columns,
            bounds=bounds[:written],
            num_bounds=num_bounds,
            order=order,
            num_of_source=num_of_source,
        )

    def fill(
        self,
        plan: Plan,
        out: Arrays,
        images: Images | None = None,
        pairs: list[Int64Array] | None = None,
        samples: Sequence[int] | None = None,
    ) -> Layout:
        """Write the samples of a plan into arrays of as many rows.

        Args:
            plan: the samples.
            out: the arrays.
            images: where to collect images.
            pairs: where to collect preference pairs, as `find_pairs` gives them.
            samples: their numbers, where they are not consecutive.

        Raises:
            CorpusError: a document is damaged, or not as long as the index says; a preference pair is cut.
            UsageError: the blend has image sources, or preference pairs, and whoever asks has no place for them.
        """
        if self.documents is not None and images is None:
            raise UsageError(
                "this loop takes tokens alone, and the blend has images",
                found=f"image sources: {', '.join(self.documents.names[i] for i in self.documents.sources)}",
                expected="sources of text",
                action="load batches with images through megaresume.attach or StreamLoader, or leave these sources out",
            )
        layout = self.lay_out(plan)
        if self._pairs and pairs is None:  # before anything is trained, although there may be none here
            raise refuse_pairs(self._pairs)
        if self._cold is not None:
            self._cold.begin(plan, range(plan.first, plan.stop) if samples is None else samples)
        first = 0
        with_images: list[Int64Array] = []
        found: list[Int64Array] = []
        for i, num in enumerate(layout.num_of_source.tolist()):
            mine = layout.order[first : first + num]
            if self.documents is not None and i in self.documents.sources:
                with_images.append(mine)
            elif num:
                self._fill_from(i, mine, plan, layout, out)
                if i in self.masked:
                    found.append(self._mask(i, mine, plan, layout, out))
            first += num
        if self._cold is not None:
            self._cold.end()
        if self.documents is not None and images is not None:
            self.documents.fill(plan, layout, np.concatenate(with_images), out, images)
        finish_rows(
            plan.starts,
            layout.columns,
            plan.table,
            self.align,
            self.pad_id,
            out.tokens,
            out.labels,
            out.loss_mask,
            out.position_ids,
        )
        if not found and pairs is None:
            return layout
        all_pairs = np.concatenate([np.zeros((0, 4), np.int64), *found])
        if len(all_pairs):
            if pairs is None:
                raise refuse_pairs([self.name_of(i) for i in self.masked])
            bounds, num_bounds = separate(
                all_pairs,
                layout.bounds,
                layout.num_bounds,
                labels=out.labels,
                loss_mask=out.loss_mask,
                position_ids=out.position_ids,
                align=self.align,
            )
            layout = replace(layout, bounds=bounds, num_bounds=num_bounds)
        if pairs is not None:
            pairs.append(all_pairs[np.lexsort((all_pairs[:, 1], all_pairs[:, 0]))])
        return layout

    def _fill_from(self, i: int, mine: Int64Array, plan: Plan, layout: Layout, out: Arrays) -> None:
        source = self.sources[i]
        if i not in self._in_one_array:  # the check is slow, and opens the file of tokens
            self._in_one_array[i] = isinstance(source, TokenSource)
        if not self._in_one_array[i]:
            self._read(source, mine, plan, layout, out)
            return
        documents = plan.table[:, DOCUMENT][mine]  # three times as fast as [mine, DOCUMENT]
        corpus = cast(TokenSource, source)
        copy_segments(
            corpus.token_view,
            corpus.token_starts(documents),
            corpus.lengths(documents),
            mine,
            plan.table,
            layout.rows,
            layout.columns,
            out.tokens,
            out.labels,
            out.loss_mask,
        )

    def _mask(self, i: int, mine: Int64Array, plan: Plan, layout: Layout, out: Arrays) -> Int64Array:
        """Take the loss away where it does not count; returns the preference pairs."""
        trained = spans_of(self.sources[i], plan.table[:, DOCUMENT][mine])
        assert trained is not None, f"{self.name_of(i)} had spans when it was opened"
        mask_segments(trained.starts, trained.spans, mine, plan.table, layout.rows, layout.columns, out.loss_mask)
        lengths = self.sources[i].lengths(plan.table[:, DOCUMENT][mine])
        return find_pairs(trained, mine, plan, layout.rows, layout.columns, lengths, self.name_of(i))

    def _read(self, source: Source, mine: Int64Array, plan: Plan, layout: Layout, out: Arrays) -> None:
        """A source without one array of tokens: a call for each segment, with the token after it where there is one."""
        totals = source.lengths(plan.table[mine, DOCUMENT]).tolist()
        for k, total in zip(mine.tolist(), totals, strict=True):
            document, offset, length = plan.table[k, [DOCUMENT, OFFSET, LENGTH]].tolist()
            row, column = int(layout.rows[k]), int(layout.columns[k])
            end = column + length
            read: npt.NDArray[Any] = source.read(document, offset, min(length + 1, total - offset))
            out.tokens[row, column:end] = read[:length]
            if out.labels.size:
                out.labels[row, end - 1] = 0
                out.labels[row, column : column + len(read) - 1] = read[1:]
            if out.loss_mask.size:
                out.loss_mask[row, column:end] = 1
                out.loss_mask[row, end - 1] = len(read) > length
