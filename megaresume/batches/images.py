"""The images of a batch: image-text documents are written into it, and their pixels beside them.

A packed batch of images is hundreds of megabytes, and getting that much memory from the system, page by page, takes
as long as writing the pixels. Pixels are in

    in the training process      float32, in memory of an earlier batch if some is free
    page-locked                  float32
    in a worker process          shared memory: float32, or levels in 8 bits for `shown` to make pixels of
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from megaresume.batches.batch import BatchArrays, SegmentLayout
from megaresume.batches.parcels import shared_memory
from megaresume.data.source import DocumentSource
from megaresume.stream.errors import ConfigError, CorpusError
from megaresume.stream.kernel import LENGTH, SOURCE
from megaresume.stream.left_out import FaultRecord
from megaresume.stream.planner import Plan

if TYPE_CHECKING:
    from megaresume.encoding.images.document import EncodedDocument, Key
    from megaresume.encoding.images.pixels import Levels, Room


@dataclass(slots=True)
class BatchImages:
    """The n images of a batch, before torch; filled by `Assembler.fill`."""

    #: the pixels of each image, float32[k, *pixel_shape]; or 8-bit levels, if the memory is for levels.
    pixels: list[npt.NDArray[Any]] = field(default_factory=list)
    #: (frames, rows, columns) of each.
    grids: list[tuple[int, int, int]] = field(default_factory=list)
    #: (row of the batch, column, tokens) of each.
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    #: documents that did not match the index; `sample` is the row of the batch.
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
        ConfigError: the sources differ in image token or pixel shape.
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
        """The map from 8-bit levels to pixels; None unless all sources have levels and the same map."""
        found = {getattr(source, "levels", None) for source in self.sources.values()}
        return found.pop() if len(found) == 1 else None

    def most_rows(self, plan: Plan) -> int:
        """The most rows of pixels that a plan's images can have; 0 for encoders that do not say."""
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
            CorpusError: a document cannot be read and the policy is ``error``; or an encoder's answer is inconsistent.
        """
        from megaresume.encoding.images.document import Key  # deferred: a start with text alone does without images

        # In the order of the table, across sources: that is the order of rows and columns.
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
        """Check everything an encoder answers: a shifted image would be trained without an error."""
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


#: memory of batches that are no longer referenced; the last two.
_LEFT: deque[npt.NDArray[np.uint8]] = deque(maxlen=2)


class _Loan:
    """Memory that is kept for a later batch once no array or tensor uses it."""

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
    """Uninitialized float32 memory of this shape."""
    num_bytes = 4 * math.prod(shape)
    return np.asarray(_Loan(num_bytes))[:num_bytes].view(np.float32).reshape(shape)


def room_of(plan: Plan, documents: DocumentReader, *, pin_memory: bool, levels: bool) -> torch.Tensor | None:
    """Memory for the pixels of a plan; unwritten parts cost nothing. None: concatenate the images at the end."""
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
    """An uninitialized tensor; in a worker process it is in shared memory, where a copy takes a fifth of the time."""
    if torch.utils.data.get_worker_info() is None or not shape[0]:
        return torch.empty(shape, dtype=dtype, pin_memory=pin_memory)
    return shared_memory(dtype.itemsize * math.prod(shape)).view(dtype).view(shape)
