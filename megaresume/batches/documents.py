"""Image-text documents into the arrays of a batch: tokens and labels as for text, and the images beside them.

    sample   | t t t I I I I t t | t t I I t t t t | padding |      t: text, I: image token
    images         ^ row, column, 4 tokens  ^ row, column, 2 tokens

The images of a batch are in the order in which their tokens lie in it: by row, then by column.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megaresume.batches.arrays import Arrays, Layout
from megaresume.data.source import DocumentSource
from megaresume.images.document import EncodedDocument, Key
from megaresume.images.processors.pixels import Levels, Room
from megaresume.stream.errors import ConfigError, CorpusError
from megaresume.stream.planning.kernel import LENGTH, SOURCE
from megaresume.stream.planning.plan import Plan


class FaultEntry(NamedTuple):
    """A record that was not as its index announced it: the fields of `megaresume.stream.faults.FaultRecord`."""

    #: number in the stream.
    sample: int
    #: name of the source.
    source: str
    document: int
    epoch: int
    #: what was done.
    policy: str
    reason: str


@dataclass(slots=True)
class Images:
    """The n images of a batch, before torch; filled by `Assembler.fill`."""

    #: of each image float32[k, *pixel_shape]; or its levels, if the room takes these.
    pixels: list[npt.NDArray[Any]] = field(default_factory=list)
    #: (frames, rows, columns) of each.
    grids: list[tuple[int, int, int]] = field(default_factory=list)
    #: (row of the batch, column, tokens) of each.
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    #: documents that were not as the index announced them; `sample` is the row of the batch.
    faults: list[FaultEntry] = field(default_factory=list)
    #: where processors write; None: each into memory of its own.
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
        """How 8-bit levels of all sources become pixels; None: not all have levels, or not in one way."""
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

    def fill(self, plan: Plan, layout: Layout, which: npt.NDArray[np.int64], out: Arrays, images: Images) -> None:
        """Write the segments ``which`` (rows of the plan's table) into their places.

        Raises:
            CorpusError: a document cannot be read and the policy is ``error``; or an encoder breaks its word.
        """
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
                images.faults.append(FaultEntry(row, key.source, document, epoch, fault.policy, fault.reason))

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


def _write(encoded: EncodedDocument, row: int, column: int, out: Arrays) -> None:
    """Tokens, the next token of each as its label, and whether that one is trained."""
    end = column + len(encoded.tokens)
    out.tokens[row, column:end] = encoded.tokens
    out.labels[row, column : end - 1] = encoded.tokens[1:]
    out.labels[row, end - 1] = 0
    out.loss_mask[row, column : end - 1] = encoded.trained[1:]
    out.loss_mask[row, end - 1] = 0
