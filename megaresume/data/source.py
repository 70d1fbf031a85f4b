"""What loading asks of a source: the lengths that the stream plans with, and the tokens themselves.

Source           documents by number
  TokenSource      all tokens in one array: a compiled loop copies them
  DocumentSource   tokens and images of one document together, with randomness that is keyed by what it is

What passes between shards, encoder and batches:

    Record  --encoder.measure-->  Measure           when the index is made: no pixel is decoded
    Record  --encoder.encode--->  EncodedDocument   when a sample is read

Randomness comes from `Key.generator` alone, so that neither workers nor ranks nor what was read before can enter it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from megaresume.stream.errors import CorpusError
from megaresume.stream.state import Fingerprint

#: What becomes of a record that cannot be decoded, or is not as long as the index says.
FaultPolicy = Literal["error", "mask", "truncate"]


@runtime_checkable
class Source(Protocol):
    """Documents by number: what every opened source has. A user's object needs less: see `PythonSource`."""

    def __len__(self) -> int:
        """Documents."""
        ...

    def length(self, i: int) -> int:
        """Tokens of document i."""
        ...

    def lengths(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of each document: int64[n] to int64[n]."""
        ...

    def get(self, i: int) -> npt.NDArray[Any]:
        """Tokens of document i, shape (length(i),)."""
        ...

    def read(self, i: int, offset: int, length: int) -> npt.NDArray[Any]:
        """`length` tokens of document i from token `offset` on."""
        ...

    def fingerprint(self, *, first: int | None = None, recompute: bool = False) -> Fingerprint:
        """What the source is: documents, tokens, hash of the lengths, tokenizer, contents.

        Args:
            first: of its first documents only, as if there were no more; None: of all.
            recompute: believe nothing that was kept from an earlier time.
        """
        ...


@runtime_checkable
class TokenSource(Source, Protocol):
    """A source whose tokens lie in one array, so that a kernel can copy them without a call for each document."""

    @property
    def token_view(self) -> npt.NDArray[Any]:
        """All tokens, one-dimensional, read-only."""
        ...

    def token_starts(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where each document starts in `token_view`: int64[n] to int64[n], in tokens."""
        ...


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
    """Which document it is, for ever: what randomness is keyed by."""

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
        """What was done about an error. Not with its cause: libraries word that, in each version anew."""
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


class VisionEncoder(Protocol):
    """What loading must know of the encoder of a `DocumentSource` before the first image is read."""

    @property
    def image_token_id(self) -> int:
        """The token that stands where features go."""
        ...

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """Of one tile or patch: ``EncodedImage.pixels`` without its first axis. The same for every image."""
        ...


@runtime_checkable
class DocumentSource(Source, Protocol):
    """A source of image-text documents, which are read whole."""

    @property
    def whole(self) -> bool:
        """True: its documents must never be cut."""
        ...

    @property
    def encoder(self) -> VisionEncoder:
        """Makes its documents."""
        ...

    def encoded(self, i: int, key: Key) -> EncodedDocument:
        """Document i, exactly ``length(i)`` tokens. Randomness comes from ``key`` alone.

        Raises:
            CorpusError: it cannot be read, or is not as the index says, and the policy is ``error``.
        """
        ...


DOCUMENT_MEMBERS = ("__len__", "length", "lengths", "get", "read", "fingerprint", "whole", "encoder", "encoded")


def is_document_source(thing: object) -> TypeGuard[DocumentSource]:
    """`isinstance` for `DocumentSource` that does not ask for the encoder, which may have a tokenizer to build."""
    return all(inspect.getattr_static(thing, member, None) is not None for member in DOCUMENT_MEMBERS)
