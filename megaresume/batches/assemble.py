"""From planned samples to a batch: `Assembler` writes its arrays, `make_batch` turns them into tensors.

Stateless: the same plan gives the same bytes anywhere.

A preference pair is one document, so that packing keeps it whole; its `Spans` say where the rejected half begins.
The halves are kept apart like two documents.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, islice
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from megaresume.batches.batch import (
    FIELDS,
    PAIRS,
    Batch,
    BatchArrays,
    Field,
    SegmentLayout,
    copy_segments,
    document_mask,
    finish_rows,
    lay_out,
    mask_segments,
    separated,
)
from megaresume.batches.cold_pages import ColdPages
from megaresume.batches.images import BatchImages, DocumentReader, pixels_of, room_of
from megaresume.batches.masked import masked_documents
from megaresume.data.source import Source, TokenSource, is_document_source
from megaresume.data.spans import Spans, has_pairs, has_spans, spans_of
from megaresume.stream.arrays import Int64Array
from megaresume.stream.errors import CorpusError, UsageError
from megaresume.stream.kernel import DOCUMENT, LENGTH, OFFSET, SOURCE
from megaresume.stream.planner import Plan

T = TypeVar("T")

_DTYPES = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
}
_NOTHING = {name: torch.empty(0, 0, dtype=dtype).numpy() for name, dtype in _DTYPES.items()}


class Assembler:
    """Reads the tokens of planned samples.

    Args:
        sources: in the order of the stream's config.
        seq_length: tokens a sample.
        align: each segment's start is a multiple of this many tokens (``packing.align``).
        pad_id: token written where there is no document.
        seed, names: of the stream and its sources, keys of the randomness in image-text documents, which need them.
            Errors name sources by them.
        cold: gets told what is read.

    Raises:
        ConfigError: image sources that do not fit together.
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
        #: sources that mark which of their tokens are trained, by number.
        self.masked = [i for i, source in enumerate(self.sources) if has_spans(source)]
        #: the names of the sources that begin with a preference pair.
        self._pairs = [self.name_of(i) for i in self.masked if has_pairs(self.sources[i])]
        #: documents excluded from the loss, by source number.
        self._without_loss = masked_documents(names)
        with_images = {i: s for i, s in enumerate(self.sources) if is_document_source(s)}
        #: reads image-text documents; None if the blend has none.
        self.documents: DocumentReader | None = None
        if with_images:
            assert seed is not None and len(names) == len(self.sources), "images need the seed and names of the stream"
            self.documents = DocumentReader(with_images, names=names, seed=seed)

    def name_of(self, i: int) -> str:
        """The name of a source, for people."""
        return f"'{self._names[i]}'" if self._names else f"source {i}"

    def lay_out(self, plan: Plan) -> SegmentLayout:
        """Lay out the segments of a plan in rows and columns."""
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
        return SegmentLayout(
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
        out: BatchArrays,
        images: BatchImages | None = None,
        pairs: list[Int64Array] | None = None,
        samples: Sequence[int] | None = None,
    ) -> SegmentLayout:
        """Write the samples of a plan into arrays with as many rows.

        Args:
            plan: the samples.
            out: the arrays.
            images: where to collect images.
            pairs: where to collect preference pairs, as `find_pairs` returns them.
            samples: their numbers, if they are not consecutive.

        Raises:
            CorpusError: a document is damaged, or its length differs from the index; a preference pair is cut.
            UsageError: the blend has image sources or preference pairs, and the caller has no place for them.
        """
        if self.documents is not None and images is None:
            raise UsageError(
                "this loop takes only tokens, and the blend has images",
                found=f"image sources: {', '.join(self.documents.names[i] for i in self.documents.sources)}",
                expected="sources of text",
                action="load batches with images through megaresume.attach or StreamLoader, or leave these sources out",
            )
        layout = self.lay_out(plan)
        if self._pairs and pairs is None:  # before anything is trained, even if this batch has none
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
        self._take_loss_away(plan, layout, out)
        if not found and pairs is None:
            return layout
        all_pairs = np.concatenate([np.zeros((0, 4), np.int64), *found])
        if len(all_pairs):
            if pairs is None:
                raise refuse_pairs([self.name_of(i) for i in self.masked])
            layout = separated(all_pairs, layout, out, self.align)
        if pairs is not None:
            pairs.append(all_pairs[np.lexsort((all_pairs[:, 1], all_pairs[:, 0]))])
        return layout

    def _fill_from(self, i: int, mine: Int64Array, plan: Plan, layout: SegmentLayout, out: BatchArrays) -> None:
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
            corpus.lengths(documents) if out.labels.size or out.loss_mask.size else documents,
            mine,
            plan.table,
            layout.rows,
            layout.columns,
            out.tokens,
            out.labels,
            out.loss_mask,
        )

    def _mask(self, i: int, mine: Int64Array, plan: Plan, layout: SegmentLayout, out: BatchArrays) -> Int64Array:
        """Clear the loss mask of tokens that are not trained; return the preference pairs."""
        trained = spans_of(self.sources[i], plan.table[:, DOCUMENT][mine])
        assert trained is not None, f"{self.name_of(i)} had spans when it was opened"
        mask_segments(trained.starts, trained.spans, mine, plan.table, layout.rows, layout.columns, out.loss_mask)
        return find_pairs(trained, mine, plan, layout, self.sources[i], self.name_of(i))

    def _take_loss_away(self, plan: Plan, layout: SegmentLayout, out: BatchArrays) -> None:
        """Clear the loss mask of excluded documents. Raises UsageError for a loop without a loss mask."""
        for i, documents in self._without_loss.items():
            if not out.loss_mask.size:
                raise UsageError(
                    "this loop has no loss mask, by which the loss of documents could be left out",
                    found=f"--skip-documents of {self.name_of(i)}; fields without 'loss_mask'",
                    expected="loss_mask among the fields, and a loop that trains by it",
                    action="add 'loss_mask' to fields",
                )
            table = plan.table
            for k in np.flatnonzero((table[:, SOURCE] == i) & np.isin(table[:, DOCUMENT], documents)).tolist():
                column = int(layout.columns[k])
                out.loss_mask[layout.rows[k], column : column + int(table[k, LENGTH])] = 0

    def _read(self, source: Source, mine: Int64Array, plan: Plan, layout: SegmentLayout, out: BatchArrays) -> None:
        """Read a source without one array of tokens: a call per segment, including the token after it if there is
        one."""
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


def find_pairs(
    spans: Spans, mine: Int64Array, plan: Plan, layout: SegmentLayout, source: Source, name: str
) -> Int64Array:
    """The pairs among the segments of one source.

    Args:
        spans: of the segments' documents.
        mine: rows of the plan's table that belong to this source.
        plan, layout: of the batch.
        source: its number.
        name: its name, for errors.

    Returns:
        int64[p, 4]: row, columns at which the chosen and the rejected half begin, and the column after the pair.

    Raises:
        CorpusError: a pair is longer than a sample, or was cut to fill one; the spans are damaged.
    """
    empty = np.flatnonzero(spans.spans[:, 0] == spans.spans[:, 1])
    which = np.searchsorted(spans.starts, empty, side="right") - 1
    segments = plan.table[mine[which]]
    lengths = source.lengths(segments[:, DOCUMENT])
    cut = np.flatnonzero((segments[:, OFFSET] != 0) | (segments[:, LENGTH] != lengths))
    if cut.size:
        document, length = int(segments[cut[0], DOCUMENT]), int(lengths[cut[0]])
        raise CorpusError(
            f"a preference pair of {name} does not stay in one sample",
            found=f"document {document} of {length} tokens, cut",
            expected="chosen and rejected in the same sample",
            cause="a pair longer than seq_length, or packing: split for this source",
            action="packing: best_fit, and leave longer pairs out: megaresume prepare --max-tokens N --too-long skip",
        )
    at = spans.spans[empty, 0]
    if ((at <= 0) | (at >= lengths)).any() or len(np.unique(which)) < len(which):
        raise CorpusError(
            f"the spans of {name} are damaged",
            found=f"rejected halves from tokens {at[:4].tolist()} of documents of {lengths[:4].tolist()} tokens",
            expected="one in each pair, within it",
            action="build the corpus again: megaresume prepare",
        )
    first = layout.columns[mine[which]]
    halves = (layout.rows[mine[which]], first, first + at, first + segments[:, LENGTH])
    return np.stack(halves, axis=1).astype(np.int64)


def refuse_pairs(names: Sequence[str]) -> UsageError:
    """Refuse pairs for a loop that did not ask for them: it would train rejected answers like chosen ones."""
    return UsageError(
        "the blend has preference pairs, and this loop would train both of each",
        found=f"chosen and rejected conversations in {', '.join(names)}",
        expected="a loop whose loss tells them apart",
        action="ask where they are: fields=(*FIELDS, 'pairs'), see docs/conversations.md; or leave the source out",
    )


def make_batch(
    plan: Plan,
    assembler: Assembler,
    *,
    samples: Sequence[int] | None = None,
    fields: Collection[Field] = FIELDS,
    attention_mask: bool = False,
    pin_memory: bool = False,
    levels: bool = False,
) -> Batch:
    """Read the samples of a plan.

    Args:
        plan: the samples.
        assembler: reads them.
        samples: their numbers, if they are not consecutive.
        fields: the optional fields to include.
        attention_mask: add the document-diagonal mask.
        pin_memory: put tensors into page-locked memory.
        levels: of images, 8-bit levels instead of pixels if they have them; `shown` makes pixels of them.

    Raises:
        CorpusError: a document is damaged, or its length differs from the index.
        UsageError: sources mark which tokens are trained, and the loop has no loss mask; or they have preference pairs,
            which the loop did not ask for.
    """
    if "loss_mask" not in fields:
        _check_all_trained(assembler)
    shape = (len(plan), assembler.seq_length)
    # Copies to a GPU track page-locked memory by the tensor that torch locked it for, so never use from_numpy.
    names = ("tokens", *(name for name in fields if name != PAIRS))
    tensors = {name: torch.empty(shape, dtype=_DTYPES[name], pin_memory=pin_memory) for name in names}
    arrays = BatchArrays(**_NOTHING | {name: tensor.numpy() for name, tensor in tensors.items()})
    images = values = None
    if assembler.documents is not None:
        from megaresume.encoding.images.pixels import Room  # deferred: a start with text alone does without images

        values = room_of(plan, assembler.documents, pin_memory=pin_memory, levels=levels)
        images = BatchImages(room=None if values is None else Room(values.numpy()))
    pairs: list[npt.NDArray[np.int64]] | None = [] if PAIRS in fields else None
    layout = assembler.fill(plan, arrays, images, pairs, samples)
    bounds = torch.from_numpy(layout.bounds)
    batch: Batch = {
        **tensors,  # type: ignore[typeddict-item]
        "cu_seqlens": list(bounds.split(layout.num_bounds.tolist())),
        "samples": torch.from_numpy(np.array(range(plan.first, plan.stop) if samples is None else samples)),
        "hashes": torch.from_numpy(plan.hashes.view(np.int64).copy()),
    }
    if pairs is not None:
        batch["pairs"] = torch.from_numpy(pairs[0])
    if assembler.documents is not None and images is not None:
        batch["pixel_values"] = pixels_of(images, values, assembler.documents, pin_memory=pin_memory)
        if batch["pixel_values"].dtype == torch.uint8:
            batch["levels"] = assembler.documents.levels
        _add_places(batch, images)
    if attention_mask:
        batch["attention_mask"] = document_mask(batch["cu_seqlens"], assembler.seq_length)
    return batch


def make_batches(
    plan: Plan,
    assembler: Assembler,
    samples: Sequence[int],
    *,
    sizes: Sequence[int],
    fields: Collection[Field] = FIELDS,
) -> list[Batch]:
    """Read the samples of several micro-batches of text at once.

    Tensors only share memory: each has its own storage, and its own version counter, as autograd needs it.

    Args:
        plan: of all samples.
        assembler: reads them.
        samples: their numbers.
        sizes: samples of each micro-batch.
        fields: as for `make_batch`, without ``pairs``.

    Raises:
        CorpusError, UsageError: as `make_batch`.
    """
    if "loss_mask" not in fields:
        _check_all_trained(assembler)
    arrays = BatchArrays.empty(len(plan), assembler.seq_length, fields)
    layout = assembler.fill(plan, arrays, samples=samples)
    others = [_parts(getattr(arrays, name), sizes) for name in fields]
    rows = zip(
        _parts(arrays.tokens, sizes),
        _grouped(_parts(layout.bounds, layout.num_bounds.tolist()), sizes),
        _parts(np.array(samples, np.int64), sizes),
        _parts(plan.hashes.view(np.int64).copy(), sizes),
        strict=True,
    )
    # For a micro-batch of 2,048 tokens this takes half as long as copying them, so keep it minimal.
    if not others:
        return [{"tokens": t, "cu_seqlens": c, "samples": n, "hashes": h} for t, c, n, h in rows]
    return [
        {"tokens": t, **dict(zip(fields, o, strict=True)), "cu_seqlens": c, "samples": n, "hashes": h}  # type: ignore[typeddict-item]
        for (t, c, n, h), *o in zip(rows, *others, strict=True)
    ]


def _parts(array: npt.NDArray[Any], sizes: Sequence[int]) -> Iterable[torch.Tensor]:
    """Split an array into tensors with these numbers of rows."""
    if len(set(sizes)) == 1:  # in half the time of slices
        return map(torch.from_numpy, array.reshape(len(sizes), sizes[0], *array.shape[1:]))
    ends = list(accumulate(sizes, initial=0))
    return map(torch.from_numpy, map(array.__getitem__, map(slice, ends, ends[1:])))


def _grouped(values: Iterable[T], sizes: Sequence[int]) -> Iterable[list[T]]:
    """Split values into lists of these sizes."""
    if set(sizes) == {1}:
        return map(list, zip(values, strict=False))
    rest = iter(values)
    return [list(islice(rest, size)) for size in sizes]


def _check_all_trained(assembler: Assembler) -> None:
    masked = [assembler.name_of(i) for i in assembler.masked]
    if assembler.documents is not None:
        masked += [assembler.name_of(i) for i in assembler.documents.sources]
    if masked:
        raise UsageError(
            "this loop has no loss mask, and the blend has sources that say which tokens are trained",
            found=f"{', '.join(masked)}; fields without 'loss_mask'",
            expected="loss_mask among the fields, and a loop that trains by it",
            action="add 'loss_mask' to fields, or leave these sources out",
        )


def _add_places(batch: Batch, images: BatchImages) -> None:
    batch["image_grid_thw"] = torch.tensor(images.grids, dtype=torch.int64).reshape(-1, 3)
    batch["image_positions"] = torch.tensor(images.positions, dtype=torch.int64).reshape(-1, 3)
    batch["num_tiles"] = torch.tensor([len(pixels) for pixels in images.pixels], dtype=torch.int32)
    samples = batch["samples"].tolist()
    batch["faults"] = [fault._replace(sample=samples[fault.sample]) for fault in images.faults]
