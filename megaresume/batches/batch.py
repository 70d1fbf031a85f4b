"""A batch: arrays, which compiled loops lay out and write as a whole, and torch tensors made from them.

The loops release the GIL. A blend with image sources has the image keys in every batch, with 0 rows if there is no
image, so that all ranks run the same graph. Image-text documents have tokens and labels like text, and the images
beside them:

    sample   | t t t I I I I t t | t t I I t t t t | padding |      t: text, I: image token
    images         ^ row, column, 4 tokens  ^ row, column, 2 tokens

The images of a batch are in the order in which their tokens lie in it: by row, then by column.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from megaresume.stream.arrays import Int64Array
from megaresume.stream.compiled import compiled
from megaresume.stream.errors import UsageError
from megaresume.stream.kernel import LENGTH, OFFSET, SOURCE
from megaresume.stream.left_out import FaultRecord
from megaresume.stream.selection import prefetch

if TYPE_CHECKING:
    from megaresume.encoding.images.pixels import Levels


#: Optional fields of a batch, included by default.
Field = Literal["labels", "loss_mask", "position_ids", "pairs"]
FIELDS: tuple[Field, ...] = ("labels", "loss_mask", "position_ids")
#: The field that is only included on request.
PAIRS: Field = "pairs"


def check_fields(fields: Collection[str]) -> None:
    """Raise a UsageError for an unknown field."""
    if isinstance(fields, str) or not {*fields} <= {*FIELDS, PAIRS}:
        raise UsageError(
            "no such field of a batch",
            found=f"fields={fields!r}",
            expected=f"some of {', '.join((*FIELDS, PAIRS))}, or none: () gives tokens and cu_seqlens alone",
            action=f"pass fields=({fields!r},)"
            if isinstance(fields, str) and fields in (*FIELDS, PAIRS)
            else "correct fields, or leave it out for all",
        )


class _Always(TypedDict):
    #: the tokens, int64[m, S].
    tokens: torch.Tensor
    #: where the segments of each sample start, int32[segments + 1], first 0, last S; padding is the last segment.
    cu_seqlens: list[torch.Tensor]
    #: int64[m]: numbers of the samples in the stream.
    samples: torch.Tensor
    #: int64[m]: identities of the samples (the bits of `Plan.hashes`).
    hashes: torch.Tensor


class Batch(_Always, total=False):
    """A micro-batch of m samples of S tokens."""

    # Optional, included by default.

    #: int64[m, S]: the next token of the same document.
    labels: torch.Tensor
    #: float32[m, S]: 1 where the label counts.
    loss_mask: torch.Tensor
    #: int64[m, S]: from 0 in every segment.
    position_ids: torch.Tensor
    #: bool[m, 1, S, S]: True where attention is not allowed (Megatron's convention); only if asked for.
    attention_mask: torch.Tensor

    #: int64[p, 4], only on request: of each preference pair its row, the columns at which the chosen and the rejected
    #: conversation begin, and the column after both.
    pairs: torch.Tensor

    # The rest only if the blend has image sources; n images, in the order of their tokens.

    #: float32[sum of num_tiles, ...]: tiles or patches of all images, one image after another.
    pixel_values: torch.Tensor
    #: int64[n, 3]: frames, rows and columns of each image, in patches, tiles or pixels depending on its processor.
    image_grid_thw: torch.Tensor
    #: int64[n, 3]: row of the micro-batch, column of the first image token, image tokens.
    image_positions: torch.Tensor
    #: int32[n]: rows of ``pixel_values`` of each image.
    num_tiles: torch.Tensor
    #: records that did not match the index, and how they were treated.
    faults: list[FaultRecord]
    #: from a worker process: how to turn ``pixel_values`` in 8 bits into pixels.
    levels: Levels | None


def document_mask(cu_seqlens: Sequence[torch.Tensor], seq_length: int) -> torch.Tensor:
    """The causal mask in which no document sees another, for models without packed attention.

    Args:
        cu_seqlens: of each sample, int32[segments + 1].
        seq_length: tokens a sample.

    Returns:
        bool[m, 1, S, S], True where attention is not allowed.
    """
    masks = torch.triu(torch.ones(seq_length, seq_length, dtype=torch.bool), diagonal=1)
    masks = masks.repeat(len(cu_seqlens), 1, 1, 1)
    for mask, bounds in zip(masks[:, 0], cu_seqlens, strict=True):
        for start in bounds[1:-1].tolist():
            mask[start:, :start] = True
    return masks


def image_places(batch: Batch) -> torch.Tensor:
    """The places of image tokens: bool[m, S]. Row by row those of ``image_positions``, one image after another.

    Raises:
        UsageError: text in the batch contains the image token too.
    """
    positions = batch["image_positions"]
    if not len(positions):
        return torch.zeros_like(batch["tokens"], dtype=torch.bool)
    token = batch["tokens"][int(positions[0, 0]), int(positions[0, 1])]
    places = batch["tokens"] == token
    if int(places.sum()) != int(positions[:, 2].sum()):
        raise UsageError(
            "a text contains the image token",
            found=f"token {int(token)} {int(places.sum())} times, {int(positions[:, 2].sum())} of them of images",
            expected="the image token only where images are",
            cause="the corpus was made with a tokenizer that knows the image token, and its texts spell it",
            action="prepare the corpus again without that token, or give the encoder another image_token",
        )
    return places


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchArrays:
    """A batch of m samples of S tokens, before torch. Fields left out are empty: [0, 0]."""

    #: the tokens, int64[m, S].
    tokens: Int64Array
    #: int64[m, S]: the next token of the same document; 0 if there is none.
    labels: Int64Array
    #: float32[m, S]: 1 where the label counts: never at the last token of a document or at padding, and only where the
    #: spans of a corpus, or the template of image-text documents, say so.
    loss_mask: npt.NDArray[np.float32]
    #: int64[m, S]: from 0 in every segment.
    position_ids: Int64Array

    @classmethod
    def empty(cls, num_samples: int, seq_length: int, fields: Collection[Field] = FIELDS) -> BatchArrays:
        """Uninitialized arrays for the tokens and these fields."""
        shape = (num_samples, seq_length)
        return cls(
            tokens=np.empty(shape, np.int64),
            labels=np.empty(shape if "labels" in fields else (0, 0), np.int64),
            loss_mask=np.empty(shape if "loss_mask" in fields else (0, 0), np.float32),
            position_ids=np.empty(shape if "position_ids" in fields else (0, 0), np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLayout:
    """The places of the n segments of m samples."""

    #: int64[n]: sample of each segment, from the first of the batch.
    rows: Int64Array
    #: where the segments start in their samples, in tokens, int64[n].
    columns: Int64Array
    #: int32[sum of num_bounds]: of each sample the starts of its segments, of the padding after them if any, and S.
    bounds: npt.NDArray[np.int32]
    #: how many segment starts each sample has, int64[m].
    num_bounds: Int64Array
    #: int64[n]: the segments grouped by source.
    order: Int64Array
    #: int64[sources]: segments of each source.
    num_of_source: Int64Array


@compiled
def lay_out(table, starts, align, seq_length, rows, columns, bounds, num_bounds, order, num_of_source):  # type: ignore[no-untyped-def]
    """Lay out the segments of a plan, and the bounds that attention must not cross.

    Args:
        table, starts: of the `Plan`: int64[n, SEGMENT_WIDTH], int64[m + 1].
        align: each segment's start is a multiple of this many tokens.
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
        if column < seq_length:  # padding too begins at a multiple, as packed-attention kernels require
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


#: Bytes of a document that are prefetched before it is copied; the hardware prefetches the rest.
ASKED_FOR = 512


@compiled
def copy_segments(  # type: ignore[no-untyped-def]
    stored, document_starts, document_lengths, which, table, rows, columns, tokens, labels, loss_mask
):
    """Copy the segments of one source into their places.

    The label of a token is the next token of its document; the last token of a document has none.

    Args:
        stored: [tokens of the corpus], any integer dtype.
        document_starts, document_lengths: int64[k], where each segment's document is in ``stored``, in tokens.
        which: int64[k], rows of ``table`` that belong to this source.
        table: int64[n, SEGMENT_WIDTH], all segments of the batch. rows, columns: int64[n], where they go.
        tokens, labels: int64[m, S]. loss_mask: float32[m, S]. Empty labels and loss mask are not written.
    """
    for j in range(which.size):
        ahead = j + 2  # documents are scattered: prefetch these while others are copied
        if ahead < which.size:
            place = document_starts[ahead] + table[which[ahead], OFFSET]
            for i in range(0, ASKED_FOR, 64):
                prefetch(stored, (place + i // stored.itemsize,))  # type: ignore[call-arg]
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
    """Clear the loss mask where the label is not trained.

    Args:
        starts, spans: int64[k + 1], int32[s, 2]: of each segment's document, as in `Spans`.
        which, table, rows, columns: as for `copy_segments`.
        loss_mask: float32[m, S], written: place i of a segment has the loss of its token i + 1.
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
        align: each segment's start is a multiple of this many tokens.
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


def separated(pairs: Int64Array, layout: SegmentLayout, out: BatchArrays, align: int) -> SegmentLayout:
    """Keep the halves of each pair apart: labels, positions and attention do not cross from one to the other.

    Args:
        pairs: int64[p, 4], as `megaresume.batches.assemble.find_pairs` gives them.
        layout: of the batch.
        out: its arrays, written.
        align: each segment's start is a multiple of this many tokens.

    Returns:
        the layout with each rejected half as a segment of its own in its bounds.

    Raises:
        UsageError: segments must be aligned, which rejected halves are not.
    """
    if align > 1:
        raise UsageError(
            "preference pairs cannot be aligned",
            found=f"packing.align: {align}",
            expected="align: 1: a rejected conversation begins right after the chosen one",
            action="leave packing.align out, or the source with the pairs",
        )
    for row, _, rejected, stop in pairs.tolist():
        if out.labels.size:
            out.labels[row, rejected - 1] = 0
        if out.loss_mask.size:
            out.loss_mask[row, rejected - 1] = 0
        if out.position_ids.size:
            out.position_ids[row, rejected:stop] = np.arange(stop - rejected)
    num_bounds = layout.num_bounds
    rows = np.concatenate([np.repeat(np.arange(len(num_bounds)), num_bounds), pairs[:, 0]])
    bounds = np.concatenate([layout.bounds, pairs[:, 2].astype(np.int32)])
    return replace(
        layout,
        bounds=bounds[np.lexsort((bounds, rows))],
        num_bounds=num_bounds + np.bincount(pairs[:, 0], minlength=len(num_bounds)),
    )
