"""An image-text document as the model is shown it, for people: text with its images in place, and the images.

tokens   12 7 9 I I I I 88 41   -->   a cat <image 384x256, 4 tokens> on a mat
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from megaresume.encoding.multimodal.types import EncodedDocument, Key, Record
from megaresume.sources.base import DocumentSource
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import CorpusError
from megaresume.trace.shard_records import shard_source

if TYPE_CHECKING:
    from PIL.Image import Image

    from megaresume.encoding.multimodal.encoder import ImageTextEncoder
    from megaresume.encoding.tokenizers import Tokenizer

__all__ = ["Picture", "Shown", "of_stage", "show"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An image of a document."""

    #: its name in the record; None: the source has no records.
    member: str | None
    #: in pixels, as stored and turned upright; None: its header cannot be read, or the source has no records.
    size: tuple[int, int] | None
    #: tokens of the document before it, and its own; None: the model is not shown it.
    offset: int | None
    num_tokens: int | None

    def __str__(self) -> str:
        size = "" if self.size is None else f" {self.size[0]}x{self.size[1]}"
        return f"<image{size}, {self.num_tokens} tokens>"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shown:
    """A document as it is shown to the model."""

    key: Key
    encoded: EncodedDocument
    #: None: the source has no records, or this one cannot be read.
    record: Record | None
    pictures: list[Picture]
    encoder: ImageTextEncoder | None

    def text(self, tokenizer: Tokenizer) -> str:
        """Its text, images in their places."""
        words, at = [], 0
        for picture in self.pictures:
            if picture.offset is not None and picture.num_tokens is not None:
                words += [tokenizer.decode(self.encoded.tokens[at : picture.offset]), str(picture)]
                at = picture.offset + picture.num_tokens
        return "".join([*words, tokenizer.decode(self.encoded.tokens[at:])])

    def fault(self) -> dict[str, str] | None:
        """What its policy did, as plain JSON; None: nothing was the matter."""
        fault = self.encoded.fault
        return None if fault is None else {"policy": fault.policy, "reason": fault.reason}

    def augmented(self, number: int) -> Image:
        """Image ``number`` as augmentation leaves it, before the processor resizes and normalises it."""
        member = self.pictures[number].member
        assert self.encoder is not None and self.record is not None and member is not None, "an image of a record"
        return self.encoder.augmented_image(self.record, member, self.key, number)


def of_stage(source: T, name: str, config: StreamConfig) -> T:
    """The source with the augmentation of a stage, which may not be that of today."""
    augmented: Any = getattr(source, "augmented", None)
    steps = next((list(s.augment) for s in config.sources if s.name == name), None)
    found: T = source if augmented is None else augmented(steps)
    return found


def show(source: DocumentSource, key: Key) -> Shown:
    """Read a document.

    Args:
        source: of the stage: see `of_stage`.
        key: which document, and in which epoch.

    Raises:
        CorpusError: it cannot be read, or is not as its index says, and the policy is ``error``.
        SetupError: its store does not answer.
    """
    encoded = source.encoded(key.document, key)
    shards = shard_source(source)
    record, encoder = None, None
    found: list[tuple[str | None, tuple[int, int] | None]] = [(None, None)] * len(encoded.images)
    if shards is not None:
        inner, start = shards
        encoder = inner.encoder
        try:
            record = inner.record(start + key.document)
        except CorpusError:
            found = []  # declared by the policy: the document is masked
        else:
            found = _images(encoder, record)
    pictures = []
    for number, (member, size) in enumerate(found):
        # A document that was cut has lost images at its end alone.
        image = encoded.images[number] if number < len(encoded.images) else None
        pictures.append(
            Picture(
                member=member,
                size=size,
                offset=None if image is None else image.offset,
                num_tokens=None if image is None else image.num_tokens,
            )
        )
    return Shown(key=key, encoded=encoded, record=record, pictures=pictures, encoder=encoder)


def _images(encoder: ImageTextEncoder, record: Record) -> list[tuple[str | None, tuple[int, int] | None]]:
    """Members and sizes in the order of the document; of a record that its template cannot read, in that of names."""
    from megaresume.encoding.multimodal.templates.base import image_members

    try:
        return [(member, (width, height)) for member, width, height, _ in encoder.images(record)]
    except CorpusError:
        return [(member, None) for member in image_members(record)]
