"""A batch: arrays, which compiled loops lay out and write as a whole, and then torch tensors; its images.

The loops do not hold the GIL. A blend with image sources has the keys of images in every batch, also in one without an
image: with 0 rows, so that all ranks run the same graph. Image-text documents have tokens and labels as text has, and
the images beside them:

    sample   | t t t I I I I t t | t t I I t t t t | padding |      t: text, I: image token
    images         ^ row, column, 4 tokens  ^ row, column, 2 tokens

The images of a batch are in the order in which their tokens lie in it: by row, then by column.

A packed batch of images is hundreds of megabytes: that the system hands out so much memory again, page by page, takes
as long as writing the pixels. They lie

    in the process that trains   float32, in memory that an earlier batch has left, if there is some
    page-locked                  float32
    in a worker process          shared memory: float32, or levels in 8 bits for `shown` to make pixels of
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from megaresume.batches.workers import shared_memory
from megaresume.data.source import DocumentSource
from megaresume.stream.compiled import compiled
from megaresume.stream.errors import ConfigError, CorpusError, UsageError
from megaresume.stream.kernel import LENGTH, OFFSET, SOURCE
from megaresume.stream.left_out import FaultRecord
from megaresume.stream.planner import Plan
from megaresume.stream.selection import prefetch

if TYPE_CHECKING:
    from megaresume.encoding.images.document import EncodedDocument, Key
    from megaresume.encoding.images.pixels import Levels, Room

Int64Array = npt.NDArray[np.int64]

#: Fields of a batch that a loop can do without.
Field = Literal["labels", "loss_mask", "position_ids", "pairs"]
FIELDS: tuple[Field, ...] = ("labels", "loss_mask", "position_ids")
#: The field that a loop has to ask for.
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

    # Unless a loop does without them.

    #: int64[m, S]: the next token of the same document.
    labels: torch.Tensor
    #: float32[m, S]: 1 where the label counts.
    loss_mask: torch.Tensor
    #: int64[m, S]: from 0 in every segment.
    position_ids: torch.Tensor
    #: bool[m, 1, S, S]: True where attention is not allowed (Megatron's convention); only if asked for.
    attention_mask: torch.Tensor

    #: int64[p, 4], only if asked for: of each preference pair its row, the columns at which the chosen and the rejected
    #: conversation begin, and the one after both.
    pairs: torch.Tensor

    # The rest only where the blend has image sources; n images, in the order of their tokens.

    #: float32[sum of num_tiles, ...]: tiles or patches of all images, one image after another.
    pixel_values: torch.Tensor
    #: int64[n, 3]: frames, rows and columns of each image: of patches, of tiles or of pixels, as its processor says.
    image_grid_thw: torch.Tensor
    #: int64[n, 3]: row of the micro-batch, column of the first image token, image tokens.
    image_positions: torch.Tensor
    #: int32[n]: rows of ``pixel_values`` of each image.
    num_tiles: torch.Tensor
    #: records that were not as the index announced them, and what was done.
    faults: list[FaultRecord]
    #: on the way from a worker process, how ``pixel_values`` in 8 bits become pixels.
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
        UsageError: a text of the batch has the image token too.
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
    """A batch of m samples of S tokens, before torch. Those that nobody asked for are empty: [0, 0]."""

    #: the tokens, int64[m, S].
    tokens: Int64Array
    #: int64[m, S]: the next token of the same document; 0 if there is none.
    labels: Int64Array
    #: float32[m, S]: 1 where the label counts: never at the last token of a document, never at padding; only where the
    #: spans of a corpus, or the template of image-text documents, say so.
    loss_mask: npt.NDArray[np.float32]
    #: int64[m, S]: from 0 in every segment.
    position_ids: Int64Array

    @classmethod
    def empty(cls, num_samples: int, seq_length: int, fields: Collection[Field] = FIELDS) -> BatchArrays:
        """Arrays that are not initialised: the tokens, and these fields."""
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

    #: int64[n], in samples from the first of the batch.
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
    """Lay out the segments of a plan, and the places across which attention must not look.

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


#: Bytes of a document that are asked for before it is copied; what follows, the processor foresees.
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
        which: int64[k], rows of ``table`` that are of this source.
        table: int64[n, SEGMENT_WIDTH], all segments of the batch. rows, columns: int64[n], where they go.
        tokens, labels: int64[m, S]. loss_mask: float32[m, S]. Labels and loss mask may be empty: they are left out.
    """
    for j in range(which.size):
        ahead = j + 2  # documents lie anywhere: these are on their way while others are copied
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


def separated(pairs: Int64Array, layout: SegmentLayout, out: BatchArrays, align: int) -> SegmentLayout:
    """Keep the halves of each pair apart: no label, no position and no attention leads from one to the other.

    Args:
        pairs: int64[p, 4], as `megaresume.batches.assemble.find_pairs` gives them.
        layout: of the batch.
        out: its arrays, written.
        align: tokens that a segment's place is a multiple of.

    Returns:
        the layout with the rejected halves as segments of their own in its bounds.

    Raises:
        UsageError: places must be multiples, which those of rejected halves are not.
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


@dataclass(slots=True)
class BatchImages:
    """The n images of a batch, before torch; filled by `Assembler.fill`."""

    #: the pixels of each image, float32[k, *pixel_shape]; or its levels, if the room takes these.
    pixels: list[npt.NDArray[Any]] = field(default_factory=list)
    #: (frames, rows, columns) of each.
    grids: list[tuple[int, int, int]] = field(default_factory=list)
    #: (row of the batch, column, tokens) of each.
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    #: documents that were not as the index announced them; `sample` is the row of the batch.
    faults: list[FaultRecord] = field(default_factory=list)
    #: the memory that processors write to; None: each allocates its own.
    room: Room | None = None


class DocumentReader:
    """Reads the image-text documents of planned samples.

    Args:
        sources: those of the stream that are image-text, by their number in it.
        names: of all sources of the stream.
        seed: of the stream.

    Raises:
        ConfigError: the sources have not one image token and one shape of pixels.
    """

    def __init__(self, sources: dict[int, DocumentSource], *, names: Sequence[str], seed: int) -> None:
        self.sources = sources
        self.names = list(names)
        self.seed = seed
        forms = {i: (s.encoder.image_token_id, tuple(s.encoder.pixel_shape)) for i, s in sources.items()}
        first = min(forms)
        for i, form in forms.items():
            if form != forms[first]:
                raise ConfigError(
                    "the image sources of a blend are encoded in different ways",
                    found=f"'{self.names[first]}': image token {forms[first][0]}, pixels {forms[first][1]}; "
                    f"'{self.names[i]}': image token {form[0]}, pixels {form[1]}",
                    expected="one image token and one image processor, since one model sees them all",
                    action="prepare the shards again with the same encoder: megaresume prepare",
                )
        self.image_token_id, self.pixel_shape = forms[first]

    @functools.cached_property
    def levels(self) -> Levels | None:
        """The map from 8-bit levels to pixels for all sources; None if not all have levels, or one map."""
        found = {getattr(source, "levels", None) for source in self.sources.values()}
        return found.pop() if len(found) == 1 else None

    def most_rows(self, plan: Plan) -> int:
        """Rows of pixels that the images of a plan have at most; of encoders that do not say, 0."""
        rows = 0
        for i, source in self.sources.items():
            most = getattr(source.encoder, "most_rows", None)
            if most is not None:
                rows += most(int(plan.table[plan.table[:, SOURCE] == i, LENGTH].sum()))
        return rows

    def fill(
        self, plan: Plan, layout: SegmentLayout, which: npt.NDArray[np.int64], out: BatchArrays, images: BatchImages
    ) -> None:
        """Write the segments ``which`` (rows of the plan's table) into their places.

        Raises:
            CorpusError: a document cannot be read and the policy is ``error``; or an encoder breaks its word.
        """
        from megaresume.encoding.images.document import Key  # deferred: a start with text alone does without images

        # In the order of the table, whatever the sources: it is that of rows and columns.
        for k in sorted(which.tolist()):
            source, position, document, offset, length = plan.table[k].tolist()
            total = self.sources[source].length(document)
            assert offset == 0 and length == total, f"document {document} of {self.names[source]} was cut"
            epoch = plan.orders[source].epoch_of(position)
            key = Key(seed=self.seed, source=self.names[source], document=document, epoch=epoch)
            with nullcontext() if images.room is None else images.room.given():
                encoded = self.sources[source].encoded(document, key)
            self._check(encoded, key, length, levels=images.room is not None and images.room.takes_levels)
            row, column = int(layout.rows[k]), int(layout.columns[k])
            _write(encoded, row, column, out)
            for image in encoded.images:
                images.pixels.append(image.pixels)
                images.grids.append(image.grid)
                images.positions.append((row, column + image.offset, image.num_tokens))
            if encoded.fault is not None:
                fault = encoded.fault
                images.faults.append(FaultRecord(row, key.source, document, epoch, fault.policy, fault.reason))

    def _check(self, encoded: EncodedDocument, key: Key, length: int, *, levels: bool) -> None:
        """A shifted image is trained without a word, so nothing that an encoder answers is believed unchecked."""
        if encoded.tokens.shape != (length,) or encoded.trained.shape != (length,):
            raise self._broken(
                key,
                f"{encoded.tokens.shape} tokens, {encoded.trained.shape} trained",
                f"{length} of both: `encoded` must follow the index, whatever the record holds",
            )
        shape, dtype = self.pixel_shape, "float32"
        if levels and self.levels is not None:
            shape, dtype = self.levels.shape, "uint8"
        places = np.flatnonzero(encoded.tokens == self.image_token_id)
        used = 0
        for image in encoded.images:
            if image.num_tokens < 1 or image.offset not in places[used : used + 1]:
                raise self._broken(
                    key,
                    f"an image of {image.num_tokens} tokens from {image.offset} on",
                    f"images one after another, from image tokens {places[used : used + 3].tolist()} ... on",
                )
            used += image.num_tokens
            if image.pixels.shape[1:] != shape or image.pixels.dtype != dtype or not len(image.pixels):
                raise self._broken(
                    key,
                    f"pixels {image.pixels.dtype}{list(image.pixels.shape)}",
                    f"{dtype}[k, {', '.join(map(str, shape))}]",
                )
        trained = int(encoded.trained[places].sum())
        if used != len(places) or trained:
            raise self._broken(
                key,
                f"{len(places)} image tokens, {used} of images, {trained} of them trained",
                "the image token exactly where images are, and never trained",
            )

    def _broken(self, key: Key, found: str, expected: str) -> CorpusError:
        return CorpusError(
            f"source '{key.source}': document {key.document} is encoded wrongly",
            found=found,
            expected=expected,
            cause="a fault in its encoder or image processor",
            action="correct it, and prepare the shards again if lengths change",
        )


def _write(encoded: EncodedDocument, row: int, column: int, out: BatchArrays) -> None:
    """Write the tokens of a document, the next token of each as its label, and whether that one is trained."""
    end = column + len(encoded.tokens)
    out.tokens[row, column:end] = encoded.tokens
    out.labels[row, column : end - 1] = encoded.tokens[1:]
    out.labels[row, end - 1] = 0
    out.loss_mask[row, column : end - 1] = encoded.trained[1:]
    out.loss_mask[row, end - 1] = 0


#: memory of batches that nobody refers to any more; the two that were left last.
_LEFT: deque[npt.NDArray[np.uint8]] = deque(maxlen=2)


class _Loan:
    """Memory that is kept for a later batch as soon as no array or tensor is in it."""

    def __init__(self, num_bytes: int) -> None:
        try:
            self._memory = _LEFT.pop()
        except IndexError:
            self._memory = np.empty(0, np.uint8)
        if len(self._memory) < num_bytes:
            # NumPy asks for large pages, PyTorch does not.
            self._memory = np.empty(num_bytes + num_bytes // 8, np.uint8)
        self.__array_interface__ = self._memory.__array_interface__

    def __del__(self) -> None:
        _LEFT.append(self._memory)


def left_memory(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Memory of this shape, float32, not initialised."""
    num_bytes = 4 * math.prod(shape)
    return np.asarray(_Loan(num_bytes))[:num_bytes].view(np.float32).reshape(shape)


def room_of(plan: Plan, documents: DocumentReader, *, pin_memory: bool, levels: bool) -> torch.Tensor | None:
    """Rows for the pixels of a plan, where what is never written costs nothing; None: copy them together at the end."""
    rows = documents.most_rows(plan)
    if levels and documents.levels is not None:
        return _empty((rows, *documents.levels.shape), torch.uint8)
    if pin_memory or torch.utils.data.get_worker_info() is not None:
        return None
    return torch.from_numpy(left_memory((rows, *documents.pixel_shape)))


def pixels_of(
    images: BatchImages, room: torch.Tensor | None, documents: DocumentReader, *, pin_memory: bool
) -> torch.Tensor:
    """The pixels (or levels) of the images of a batch, one image after another.

    Args:
        images: of the batch.
        room: what `room_of` gave.
        documents: which read them.
        pin_memory: put them into page-locked memory.
    """
    rows = sum(map(len, images.pixels))
    if room is not None and images.room is not None and images.room.holds(images.pixels):
        shared = room.is_shared()  # type: ignore[no-untyped-call]
        # By way of NumPy: the tensor's storage is these rows alone.
        return room[:rows] if shared else torch.from_numpy(room.numpy()[:rows])
    in_levels = documents.levels is not None and images.room is not None and images.room.takes_levels
    row = documents.levels.shape if in_levels and documents.levels is not None else documents.pixel_shape
    values = _empty((rows, *row), torch.uint8 if in_levels else torch.float32, pin_memory=pin_memory)
    if images.pixels:
        np.concatenate(images.pixels, out=values.numpy())
    return values


def shown(batch: Any, *, pin_memory: bool = False) -> Any:
    """A batch from a worker process, with pixels instead of levels if it has these."""
    levels = batch.pop("levels", None)
    if levels is not None:
        values = batch["pixel_values"]
        shape = len(values), *levels.pixel_shape
        pixels = torch.empty(shape, pin_memory=True) if pin_memory else torch.from_numpy(left_memory(shape))
        levels.fill(values.numpy(), pixels.numpy())
        batch["pixel_values"] = pixels
    return batch


def _empty(shape: tuple[int, ...], dtype: torch.dtype, *, pin_memory: bool = False) -> torch.Tensor:
    """A tensor that is not initialised; in a worker process, in memory that the consumer reads: a copy takes a fifth of
    its time."""
    if torch.utils.data.get_worker_info() is None or not shape[0]:
        return torch.empty(shape, dtype=dtype, pin_memory=pin_memory)
    return shared_memory(dtype.itemsize * math.prod(shape)).view(dtype).view(shape)
