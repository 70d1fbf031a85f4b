"""A record and its document: what passes between shards, encoder and batches.

    Record  --encoder.measure-->  Measure           when the index is made: no pixel is decoded
    Record  --encoder.encode--->  EncodedDocument   when a sample is read

Randomness only comes from `Key.generator`, so that workers, ranks and earlier reads cannot affect it.

What happens to a record that cannot be encoded, or whose length differs from its index:

    policy     cannot be encoded           longer than indexed     shorter than indexed
    error      CorpusError                 CorpusError             CorpusError
    mask       masked, as long as indexed  masked                  masked
    truncate   masked, as long as indexed  text cut at its end     masked at its end

A damaged image of a page whose template has ``damaged_images`` is no error: its place is masked, with a fault.
A record whose content changed, but not its length, is treated like one that cannot be encoded.

The document always has its indexed length, so the stream does not move. The outcome depends only on the record and the
index, so it is the same after a resume, on another rank and in another worker. Text is cut, an image never:

    tokens   [ t t t I I I I t t E ]     to 5:  [ t t t . . ]    an image that does not fit whole is masked
                                         to 12: [ t t t I I I I t t E . . ]
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from megaresume.stream.errors import CorpusError

#: What to do with a record that cannot be decoded, or whose length differs from the index.
FaultPolicy = Literal["error", "mask", "truncate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One record of a shard, as stored."""

    #: the record's key in the shard: what its members share before the first dot of their file names.
    key: str
    #: the path of the shard.
    path: str
    #: extension in lower case, without the first dot ("jpg", "0.png", "json") to content.
    members: Mapping[str, bytes]
    #: the names of the images of a row beside a folder of images, as members, in the row's order.
    images: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """The identity of a document, forever: the key of its randomness."""

    #: the seed of the stream.
    seed: int
    #: name of the source.
    source: str
    #: number in the source.
    document: int
    #: the epoch, counted from 0.
    epoch: int

    def generator(self, image: int = 0) -> np.random.Generator:
        """The generator for one image of the document (0-based)."""
        # Lengths are included so that no two tuples have the same encoding.
        name = self.source
        text = f"megaresume.image.1|{self.seed}|{len(name.encode())}|{name}|{self.document}|{self.epoch}|{image}"
        words = np.frombuffer(hashlib.shake_256(text.encode()).digest(16), "<u8")
        return np.random.Generator(np.random.Philox(key=words))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """The length of a record, measured without decoding its images."""

    #: tokens of the whole document: text, image tokens, end of document.
    tokens: int
    num_images: int
    #: image tokens of all images.
    image_tokens: int
    #: images that the page names, and that are missing or damaged: left out, as the template asks.
    missing_images: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedImage:
    """One image of a document, as pixels."""

    #: tokens of the document before the first image token of the image.
    offset: int
    #: image tokens, which the model replaces by features. Other tokens may be between them.
    num_tokens: int
    #: float32[k, ...], normalised: k tiles [k, 3, H, W], or k patches [k, 3 * P * P].
    pixels: npt.NDArray[np.float32]
    #: (frames, rows, columns) in patches, tiles or pixels, depending on the processor.
    grid: tuple[int, int, int]
    #: the image's number in the document, from 0; None: its index in ``images``, none of which was left out.
    number: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A record that did not match the index."""

    #: what was done to the document: ``mask`` or ``truncate``.
    policy: FaultPolicy
    #: what was found and expected, for people. The same on every machine: no paths of this one, no addresses.
    reason: str

    @classmethod
    def of(cls, error: CorpusError, policy: FaultPolicy) -> Fault:
        """A fault from an error, without its cause, which libraries word differently in each version."""
        reason = error.headline if error.found is None else f"{error.headline}; found {error.found}"
        return cls(policy=policy, reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedDocument:
    """A document as the model gets it, always of the indexed length."""

    #: int64[n]; image tokens where features go.
    tokens: npt.NDArray[np.int64]
    #: bool[n]: True where the token is to be predicted.
    trained: npt.NDArray[np.bool_]
    images: tuple[EncodedImage, ...] = ()
    fault: Fault | None = None

    def end(self, image: EncodedImage) -> int:
        """The place after the last image token of an image of the document."""
        after = self.tokens[image.offset :]
        return image.offset + int(np.flatnonzero(after == after[0])[image.num_tokens - 1]) + 1


log = logging.getLogger(__name__)

#: (source, document) that this process has reported.
_reported: set[tuple[str, int]] = set()


class RecordEncoder(Protocol):
    """The part of `megaresume.encoding.images.encoder.ImageTextEncoder` that is needed here."""

    @property
    def filler(self) -> int:
        """The token that fills masked places."""

    def encode(self, record: Record, key: Key, part: int = 0) -> EncodedDocument:
        """A document of a record. Raises CorpusError if there is none."""


def encode_as_indexed(
    encoder: RecordEncoder,
    record_or_error: Record | CorpusError,
    key: Key,
    *,
    tokens: int,
    policy: FaultPolicy,
    changed: CorpusError | None = None,
    part: int = 0,
) -> EncodedDocument:
    """The document, exactly as long as its index says.

    Args:
        encoder: of the source.
        record_or_error: the record, or why it could not be read.
        key: identifies the document.
        tokens: its length in the index.
        policy: of the source.
        changed: whether the record's content differs from when it was measured.
        part: number of the document, in a record that makes several.

    Returns:
        the document; with `fault` if the policy was applied, which is logged once per document and process.

    Raises:
        CorpusError: the policy is ``error``.
    """
    document, error = None, None
    if isinstance(record_or_error, CorpusError):
        error = record_or_error
    else:
        try:
            document = encoder.encode(record_or_error, key, part)
        except CorpusError as raised:
            error = raised
    if document is not None and len(document.tokens) != tokens:
        error = _other_length(record_or_error, len(document.tokens), tokens)
    if error is None and changed is not None:
        document, error = None, changed
    if error is None:
        assert document is not None
        if document.fault is not None:
            _report(key, tokens, document.fault)
        return document
    if policy == "error":
        raise error
    if policy == "mask" or document is None:
        document = masked_document(tokens, encoder.filler)
    else:
        document = fit_document(document, tokens, encoder.filler)
    fault = Fault.of(error, policy)
    _report(key, tokens, fault, error.cause)
    return dataclasses.replace(document, fault=fault)


def fit_document(document: EncodedDocument, tokens: int, filler: int) -> EncodedDocument:
    """The document, exactly ``tokens`` long.

    Args:
        document: of any length.
        tokens: wanted.
        filler: token id of empty places: after the end, and instead of an image that does not fit whole.

    Returns:
        the same document if it has that length; otherwise its first tokens, with the images that lie whole in them.
    """
    length = len(document.tokens)
    if length == tokens:
        return document
    kept = min(length, tokens)
    ids = np.full(tokens, filler, np.int64)
    ids[:kept] = document.tokens[:kept]
    trained = np.zeros(tokens, np.bool_)
    trained[:kept] = document.trained[:kept]
    images = tuple(image for image in document.images if document.end(image) <= kept)
    for image in document.images[len(images) :]:
        ids[image.offset : kept] = filler
    return dataclasses.replace(document, tokens=ids, trained=trained, images=images)


def masked_document(tokens: int, filler: int) -> EncodedDocument:
    """A document that trains nothing: ``tokens`` fillers, no image."""
    return EncodedDocument(tokens=np.full(tokens, filler, np.int64), trained=np.zeros(tokens, np.bool_))


def _report(key: Key, tokens: int, fault: Fault, cause: str | None = None) -> None:
    if (key.source, key.document) in _reported:
        return
    _reported.add((key.source, key.document))
    log.warning(
        "source '%s', document %d (%d tokens), policy %s: %s%s",
        key.source,
        key.document,
        tokens,
        fault.policy,
        fault.reason,
        f" ({cause})" if cause else "",
    )


def _other_length(record: object, found: int, expected: int) -> CorpusError:
    name = f"record '{record.key}'" if isinstance(record, Record) else "a record"
    return CorpusError(
        f"{name} is not as long as its index says",
        found=f"{found} tokens",
        expected=f"{expected} tokens",
        cause="a shard that was written again after `megaresume prepare`",
        action="run megaresume prepare again, or on_fault: truncate (or mask)",
    )
