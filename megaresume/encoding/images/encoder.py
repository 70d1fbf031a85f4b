"""Turns records into documents: text to tokens, images to pixels and places, and the mask of trained tokens.

    record --template--> text, images --+-- measures: tokenize, read image headers -> lengths        (the index)
                                        `-- encode:   tokenize, decode, augment, process --> document (a sample)

    tokens   [ 12  7  9  I  I  I  I  88  41  5  E ]     I image token, E end of document
    trained  [  .  .  .  .  .  .  .   x   x  x  x ]

An encoder is a value: its spec (plain JSON, including the tokenizer's content) defines everything except the
augmentation, on which no length depends.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import xxhash

from megaresume.encoding.images.document import EncodedDocument, EncodedImage, Fault, Key, Measure, Record
from megaresume.encoding.images.pieces import Image, Missing, Part, Piece, Text, Unit, Words, split_page
from megaresume.encoding.images.pixels import Levels
from megaresume.encoding.images.processor import check_processor, pattern_of
from megaresume.encoding.images.processors import processor_from_options
from megaresume.encoding.images.rgb import ImageOptions, Step, augmentation_from_options, decode, size_of
from megaresume.encoding.images.spec import check_spec, spec_from_options
from megaresume.encoding.images.templates import template_from_options
from megaresume.encoding.text.tokenizers import ByteTokenizer, Tokenizer, unpack_tokenizer
from megaresume.stream.errors import ConfigError, CorpusError
from megaresume.stream.schema import read

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage


T = TypeVar("T")


class ImageTextEncoder:
    """A stateless function of records; picklable, and cheap to send to a worker.

    Args:
        spec: as `to_spec` returns it; it is without augmentation (`augmented`).

    Raises:
        ConfigError: a spec that this version cannot read, or tokens that the tokenizer does not have.
        UsageError, SetupError: the tokenizer cannot be built.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        check_spec(spec)
        self._spec = dict(spec)
        self._steps: tuple[Step, ...] = ()
        #: the template, which turns a record into pieces.
        self.template = template_from_options(spec["template"])
        self._images = read(ImageOptions, spec["images"], "images")
        self.processor = processor_from_options(spec["processor"])
        self.image_token_id, self.vocab_size = self._image_token()
        #: the token for masked places; None without an end-of-document token.
        self.eod = self.tokenizer.eod
        if spec["eod"] and self.eod is None:
            raise ConfigError(
                f"tokenizer {self.tokenizer.name} has no known end-of-document token",
                found="eod: true",
                expected="a token that ends every document",
                action="name it: eod_token: TOKEN, or eod: false",
            )
        self.fingerprint = self._fingerprint()

    @classmethod
    def from_options(cls, options: object, base_dir: str | Path = ".") -> ImageTextEncoder:
        """The encoder of options in YAML (`megaresume.encoding.images.spec`), its processor checked.

        Raises:
            ConfigError: an unknown key, a bad value, or a processor that breaks its promises.
            UsageError, SetupError: the tokenizer cannot be read.
        """
        encoder = cls(spec_from_options(options, base_dir))
        check_processor(encoder.processor)
        return encoder

    def to_spec(self) -> dict[str, Any]:
        """Plain JSON that holds everything except the augmentation."""
        return copy.deepcopy(self._spec)

    def augmented(self, options: object) -> ImageTextEncoder:
        """The same encoder with the steps that ``options`` declare (None: without any).

        Raises:
            ConfigError: an unknown step or option, or a bad value.
        """
        other = copy.copy(self)
        other._steps = augmentation_from_options(options)
        return other

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """Shape of one row of an image's pixels."""
        return tuple(self.processor.pixel_shape)

    @property
    def levels(self) -> Levels | None:
        """The map from 8-bit levels to pixels; None if there is none, or it is unknown."""
        return getattr(self.processor, "levels", None) if type(self) is ImageTextEncoder else None

    def most_rows(self, num_tokens: int) -> int:
        """The most rows of pixels that a document of this many tokens has; 0 if the processor does not say."""
        most: Callable[[int], int] | None = getattr(self.processor, "most_rows", None)
        return 0 if most is None else most(num_tokens)

    @property
    def filler(self) -> int:
        """The token that fills masked places."""
        return 0 if self.eod is None else self.eod

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Built on first use, so that a worker that got the encoder builds it only if it needs it."""
        return unpack_tokenizer(self._spec["tokenizer"], self._spec["eod_token"])

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "tokenizer"}

    def __repr__(self) -> str:
        kinds = (
            f"{self._spec['processor']['kind']}, {self._spec['template']['kind']}, {self._spec['tokenizer']['name']}"
        )
        return f"ImageTextEncoder({kinds}, {self.fingerprint[:8]})"

    def measures(self, record: Record, *, decoded: bool = False) -> list[Measure]:
        """Lengths of each document, from text and image headers: no pixel is decoded unless ``decoded``.

        A record is one document, unless its template splits long ones.

        Args:
            record: as in its shard.
            decoded: decode every image, to find truncated ones.

        Raises:
            CorpusError: the record is not what the template expects, or an image (its header) cannot be read.
        """
        pieces = self._pieces(record)
        missing = sum(isinstance(piece, Missing) for piece in pieces)
        if decoded:
            shown = [piece.member for piece in pieces if isinstance(piece, Image)]
            missing += sum(self._is_unreadable(record, member, decode) for member in shown)
        measures: list[Measure] = []
        for parts in self._documents(record, pieces):
            images = [self._size(record, part.member)[2] for part in parts if isinstance(part, Image)]
            words = sum(len(part[0]) for part in parts if not isinstance(part, Image))
            measures.append(
                Measure(
                    tokens=words + sum(map(len, images)),
                    num_images=len(images),
                    image_tokens=sum(ids.count(self.image_token_id) for ids in images),
                    missing_images=0 if measures else missing,
                )
            )
        return measures

    def encode(self, record: Record, key: Key, part: int = 0) -> EncodedDocument:
        """A document: as many tokens as `measures` says, whatever the augmentation draws.

        Args:
            record: as in its shard.
            key: identifies the document.
            part: number of the document, 0-based, in a record that makes several.

        Raises:
            CorpusError: as `measures`, there is no such part, or an image cannot be decoded.
        """
        tokens: list[int] = []
        spans: list[tuple[int, int]] = []
        images: list[EncodedImage] = []
        fault: Fault | None = None
        number = 0
        for piece in self._document(record, part):
            if isinstance(piece, Image):
                try:
                    drawn = self._drawn(record, piece.member, key, number)
                except CorpusError as error:
                    if not self.template.damaged_images:
                        raise
                    fault = fault or Fault.of(error, "mask")
                    tokens += [self.filler] * len(self._size(record, piece.member)[2])
                else:
                    image, ids = self._image(_name(record, piece.member), *drawn, number=number, offset=len(tokens))
                    tokens += ids
                    images.append(image)
                number += 1
            else:
                ids, is_trained = piece
                if is_trained:
                    spans.append((len(tokens), len(tokens) + len(ids)))
                tokens += ids
        trained = np.zeros(len(tokens), np.bool_)
        for start, end in spans:
            trained[start:end] = True
        return EncodedDocument(tokens=np.array(tokens, np.int64), trained=trained, images=tuple(images), fault=fault)

    def _pieces(self, record: Record) -> list[Piece]:
        """The pieces of the template; images with unreadable headers count as missing, if it allows that."""
        pieces = self.template.pieces(record)
        if not self.template.damaged_images:
            return pieces
        return [
            Missing(name=piece.member)
            if isinstance(piece, Image) and self._is_unreadable(record, piece.member, size_of)
            else piece
            for piece in pieces
        ]

    def _is_unreadable(self, record: Record, member: str, read: Callable[..., object]) -> bool:
        """Whether `size_of` or `decode` fails. Raises CorpusError if the template then rejects the page."""
        try:
            read(record.members[member], self._images, _name(record, member))
        except CorpusError:
            if not self.template.damaged_images:
                raise
            return True
        return False

    def images(self, record: Record, part: int = 0) -> list[tuple[str, int, int, int]]:
        """(member, width, height, image tokens) of the images of a document in order, from their headers.

        Raises:
            CorpusError: as `measures`, or there is no such part.
        """
        shown = [piece.member for piece in self._document(record, part) if isinstance(piece, Image)]
        sizes = [(member, *self._size(record, member)) for member in shown]
        return [(member, width, height, ids.count(self.image_token_id)) for member, width, height, ids in sizes]

    def augmented_image(self, record: Record, member: str, key: Key, number: int) -> PILImage:
        """An image as the model sees it, before the processor resizes and normalises it.

        Args:
            record: its record.
            member: its name there.
            key: identifies the document.
            number: of the image in the document, 0-based.

        Raises:
            CorpusError: it cannot be decoded.
        """
        return self._drawn(record, member, key, number)[0]

    def _document(self, record: Record, part: int) -> Sequence[Part]:
        documents = self._documents(record, self._pieces(record))
        if part < len(documents):
            return documents[part]
        raise CorpusError(
            f"record '{record.key}' is not as long as its index says",
            found=f"{len(documents)} documents",
            expected=f"{part + 1} or more",
            cause="a shard that was written again after `megaresume prepare`",
            action="run megaresume prepare again",
        )

    def _documents(self, record: Record, pieces: Sequence[Piece]) -> list[list[Part]]:
        """Images and texts of each document, in order."""
        units = list(self._units(record, pieces))
        end: list[Part] = []
        if self._spec["eod"]:
            last = next((piece for piece in reversed(pieces) if isinstance(piece, Text)), None)
            end = [([self.filler], last is not None and last.trained)]
        limit = self.template.split
        if limit is None:
            documents = [[*(part for unit in units for part in unit.parts), *end]]
        else:
            *others, final = split_page(units, limit - len(end))
            documents = [*others, [*final, *end]]
        num_images = max(sum(isinstance(part, Image) for part in document) for document in documents)
        if num_images > 1 and getattr(self.processor, "alone", False):
            raise CorpusError(
                f"record '{record.key}' has several images, and its processor is for one",
                found=f"{num_images} images in a document",
                expected="1: of an image that is not alone, transformers makes other pixels and fewer tokens",
                action="leave the record out, or see on_fault",
            )
        return documents

    def _units(self, record: Record, pieces: Iterable[Piece]) -> Iterator[Unit]:
        """Images with the tokens around them, and texts; tokens are only counted if pages are split."""
        for piece in pieces:
            if isinstance(piece, Missing):
                continue
            if isinstance(piece, Image):
                around = [self._markup(self._spec[name]) for name in ("image_start", "image_end")]
                image = [] if self.template.split is None else self._size(record, piece.member)[2]
                tokens = len(image) + sum(len(ids) for words in around for ids, _ in words)
                yield Unit(parts=[*around[0], piece, *around[1]], tokens=tokens, image=_name(record, piece.member))
            else:
                ids = self.tokenizer.encode(piece.text, special=piece.markup)
                if self.image_token_id in ids:
                    raise CorpusError(
                        f"record '{record.key}' spells the image token in its text",
                        found=f"token {self.image_token_id} in {piece.text!r:.60}",
                        expected="image tokens only where images are",
                        cause="a mark such as <image> that the template does not recognise",
                        action="correct the template, or the record",
                    )
                yield Unit(parts=[(ids, piece.trained)], tokens=len(ids))

    def _markup(self, text: str) -> list[Words]:
        return [(self.tokenizer.encode(text, special=True), False)] if text else []

    def _size(self, record: Record, member: str) -> tuple[int, int, list[int]]:
        """Width and height of an image, from its header; and its placeholder tokens."""
        name = _name(record, member)
        width, height = size_of(record.members[member], self._images, name)
        return width, height, self._standing(name, width, height)

    def _standing(self, name: str, width: int, height: int) -> list[int]:
        """The placeholder tokens of an image of this size."""
        ids: list[int] = []
        for part in _named(name, pattern_of, self.processor, width, height):
            ids += [self.image_token_id] * part if isinstance(part, int) else self.tokenizer.encode(part, special=True)
        return ids

    def _image(
        self, name: str, image: PILImage, generator: np.random.Generator, *, number: int, offset: int
    ) -> tuple[EncodedImage, list[int]]:
        """The image, and the tokens that stand for it."""
        size = image.size
        pixels, grid = _named(name, self.processor, image, generator)
        ids = self._standing(name, *size)
        num_tokens = ids.count(self.image_token_id)
        made = self.processor.tokens_of(pixels, grid)
        if made != num_tokens:
            raise CorpusError(
                f"{name}: the processor made a different number of tokens than it announced",
                found=f"{made} tokens of a grid of {grid}",
                expected=f"{num_tokens} tokens, by its num_tokens",
                cause="a processor whose two formulas differ for this size",
                action="correct the processor; its lengths must not depend on what it draws",
            )
        first = offset + ids.index(self.image_token_id)
        return EncodedImage(offset=first, num_tokens=num_tokens, pixels=pixels, grid=grid, number=number), ids

    def _drawn(self, record: Record, member: str, key: Key, number: int) -> tuple[PILImage, np.random.Generator]:
        """The image after augmentation, in its stored size; and the generator in its state after that."""
        image = decode(record.members[member], self._images, _name(record, member))
        generator = key.generator(number)
        for step in self._steps:
            image = step(image, generator)
        return image, generator

    def _image_token(self) -> tuple[int, int]:
        """The id of the image token, and the size of its vocabulary."""
        text, tokenizer = self._spec["image_token"], self.tokenizer
        if text is None or isinstance(tokenizer, ByteTokenizer):
            return tokenizer.vocab_size, tokenizer.vocab_size + 1
        number = tokenizer.token_id(text)
        if number is None:
            raise ConfigError(
                f"tokenizer {tokenizer.name} has no token {text!r}",
                found=f"image_token: {text!r}",
                expected="the text of one of its tokens",
                cause="a tokenizer of a text model, to which the image token was never added",
                action="add the token to the tokenizer, or image_token: null takes the id after its vocabulary",
            )
        return number, tokenizer.vocab_size

    def _fingerprint(self) -> str:
        # Identifies the tokenizer by what it does, not by its file name or how its content was packed.
        spec = {**self._spec, "tokenizer": self.tokenizer.fingerprint()}
        return xxhash.xxh3_128_hexdigest(json.dumps(spec, sort_keys=True, separators=(",", ":")).encode())


def _name(record: Record, member: str) -> str:
    return f"record '{record.key}': {member}"


def _named(name: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function; name the image in a CorpusError that it raises."""
    try:
        return function(*arguments)
    except CorpusError as error:
        raise CorpusError(
            f"{name}: {error.headline}",
            found=error.found,
            expected=error.expected,
            cause=error.cause,
            action=error.action,
        ) from error
