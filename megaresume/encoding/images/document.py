"""What passes between shards, encoder and batches.

    Record  --encoder.measure-->  Measure           when the index is made: no pixel is decoded
    Record  --encoder.encode--->  EncodedDocument   when a sample is read

Randomness comes from `Key.generator` alone, so that neither workers nor ranks nor what was read before can enter it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from megaresume.stream.errors import CorpusError

#: What becomes of a record that cannot be decoded, or is not as long as the index says.
FaultPolicy = Literal["error", "mask", "truncate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One record of a shard, as it lies there."""

    #: as in the shard: what the members share before the first dot of their file names.
    key: str
    #: of the shard.
    path: str
    #: extension in lower case, without the first dot ("jpg", "0.png", "json") to content.
    members: Mapping[str, bytes]
    #: of a row beside a folder of images: their names, as members, in the order in which the row has them.
    images: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """Which document it is, forever: what randomness is keyed by."""

    #: of the stream.
    seed: int
    #: name of the source.
    source: str
    #: number in the source.
    document: int
    #: 0-based.
    epoch: int

    def generator(self, image: int = 0) -> np.random.Generator:
        """The generator for one image of the document (0-based)."""
        # Lengths are written out so that no two tuples share an encoding.
        name = self.source
        text = f"megaresume.image.1|{self.seed}|{len(name.encode())}|{name}|{self.document}|{self.epoch}|{image}"
        words = np.frombuffer(hashlib.shake_256(text.encode()).digest(16), "<u8")
        return np.random.Generator(np.random.Philox(key=words))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """How long a record is, without decoding its images."""

    #: of the whole document: text, image tokens, end of document.
    tokens: int
    num_images: int
    #: of all images.
    image_tokens: int
    #: named by the page, and not in the record or damaged: the model is not shown them, as the template was told.
    missing_images: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedImage:
    """One image of a document."""

    #: tokens of the document before the first image token of the image.
    offset: int
    #: image tokens: those that the model replaces by its features. Other tokens may stand between them.
    num_tokens: int
    #: float32[k, ...], normalised: k tiles [k, 3, H, W], or k patches [k, 3 * P * P].
    pixels: npt.NDArray[np.float32]
    #: (frames, rows, columns) of patches, of tiles or of pixels, as the processor says.
    grid: tuple[int, int, int]
    #: among the images of the document, 0-based; None: as it stands in ``images``, of which none was left out.
    number: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A record that could not be used as the index announced it."""

    #: what was done: ``mask`` or ``truncate``.
    policy: FaultPolicy
    #: for people: what was found and expected. The same on every machine: no paths of this one, no addresses.
    reason: str

    @classmethod
    def of(cls, error: CorpusError, policy: FaultPolicy) -> Fault:
        """What was done about an error. Not with its cause: libraries word that, in each version again."""
        reason = error.headline if error.found is None else f"{error.headline}; found {error.found}"
        return cls(policy=policy, reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedDocument:
    """What a document is to the model: as many tokens as the index says, whatever happened."""

    #: int64[n]; the image token stands where features go.
    tokens: npt.NDArray[np.int64]
    #: bool[n]: True where the token is to be predicted.
    trained: npt.NDArray[np.bool_]
    images: tuple[EncodedImage, ...] = ()
    fault: Fault | None = None

    def end(self, image: EncodedImage) -> int:
        """The place after the last image token of an image of the document."""
        after = self.tokens[image.offset :]
        return image.offset + int(np.flatnonzero(after == after[0])[image.num_tokens - 1]) + 1
