"""Documents as the model sees them, for people: text with images in place.

    tokens   12 7 9 I I I I 88 41   -->   a cat <image 384x256, 4 tokens> on a mat

For a source that knows which tokens are trained, these are enclosed in the marks of `TRAINED`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from megaresume.data.source import DocumentSource, Source, is_document_source
from megaresume.data.spans import spans_of
from megaresume.encoding.images.document import EncodedDocument, Key, Record
from megaresume.encoding.text.conversation_encoder import runs_of
from megaresume.encoding.text.tokenizers import ByteTokenizer, Tokenizer
from megaresume.runs.trace.trace import TracePiece, shard_source
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import CorpusError, UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

    from megaresume.encoding.images.encoder import ImageTextEncoder


T = TypeVar("T")
#: The marks around trained text.
TRAINED = ("⟦", "⟧")


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An image of a document."""

    #: the name of the image in the record; None if the source has no records.
    member: str | None
    #: the size in pixels, upright; None if its header cannot be read, or the source has no records.
    size: tuple[int, int] | None
    #: position of its first image token in the document, number of image tokens, and the position after the last one;
    #: None: the model does not see it.
    offset: int | None
    num_tokens: int | None
    end: int | None

    def __str__(self) -> str:
        size = "" if self.size is None else f" {self.size[0]}x{self.size[1]}"
        return f"<image{size}, {self.num_tokens} tokens>"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shown:
    """A document as the model sees it."""

    key: Key
    encoded: EncodedDocument
    #: the record; None if the source has none, or this one cannot be read.
    record: Record | None
    pictures: list[Picture]
    encoder: ImageTextEncoder | None

    def text(self, tokenizer: Tokenizer, *, marks: bool = False) -> str:
        """The text with images in place; with ``marks``, trained text is enclosed in them."""

        def decode(first: int, stop: int | None) -> str:
            trained = self.encoded.trained[first:stop] if marks else None
            return decode_marked(tokenizer, self.encoded.tokens[first:stop], trained)

        words, at = [], 0
        for picture in self.pictures:
            if picture.offset is not None and picture.end is not None:
                words += [decode(at, picture.offset), str(picture)]
                at = picture.end
        return "".join([*words, decode(at, None)])

    def fault(self) -> dict[str, str] | None:
        """What the policy for faulty documents did, as plain JSON; None if the document is intact."""
        fault = self.encoded.fault
        return None if fault is None else {"policy": fault.policy, "reason": fault.reason}

    def augmented(self, number: int) -> Image:
        """Image ``number`` after augmentation, before the processor resizes and normalises it."""
        member = self.pictures[number].member
        assert self.encoder is not None and self.record is not None and member is not None, "an image of a record"
        return self.encoder.augmented_image(self.record, member, self.key, number)


def decode_marked(tokenizer: Tokenizer, tokens: npt.NDArray[Any], trained: npt.NDArray[np.bool_] | None) -> str:
    """The text of tokens, with `TRAINED` around the trained ones; None: without marks."""
    text = tokenizer.decode(tokens)
    if trained is None:
        return text
    # Decoding in parts would change the text: use the lengths of its prefixes to find the edges in the whole.
    edges = [edge for run in runs_of(trained) for edge in run]
    places = [len(text) if edge == len(tokens) else len(tokenizer.decode(tokens[:edge])) for edge in edges]
    for k in reversed(range(len(places))):
        text = text[: places[k]] + TRAINED[k % 2] + text[places[k] :]
    return text


def marked_ids(tokens: list[int], trained: Sequence[Sequence[int]], offset: int) -> str:
    """Token ids separated by spaces, with `TRAINED` around the trained ones.

    Args:
        tokens: those of the document from token ``offset`` on.
        trained: runs of its trained tokens.
        offset: of the first token.
    """
    words = list(map(str, tokens))
    for first, stop in trained:
        words[first - offset] = TRAINED[0] + words[first - offset]
        words[stop - 1 - offset] += TRAINED[1]
    return " ".join(words)


def of_stage(source: T, name: str, config: StreamConfig) -> T:
    """The source with the augmentation of a stage, which may differ from the current one."""
    augmented: Any = getattr(source, "augmented", None)
    steps = next((list(s.augment) for s in config.sources if s.name == name), None)
    found: T = source if augmented is None else augmented(steps)
    return found


def show(source: DocumentSource, key: Key) -> Shown:
    """Read a document.

    Args:
        source: for the stage: see `of_stage`.
        key: the document and the epoch.

    Raises:
        CorpusError: it cannot be read, or differs from its index, and the policy is ``error``.
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
            found = []  # the policy decides: the document is masked
        else:
            found = _images(encoder, record, inner.part(start + key.document))
    pictures = []
    # A document that was cut lacks images at its end, others those that are damaged.
    shown = {k if image.number is None else image.number: image for k, image in enumerate(encoded.images)}
    for number, (member, size) in enumerate(found):
        image = shown.get(number)
        pictures.append(
            Picture(
                member=member,
                size=size,
                offset=None if image is None else image.offset,
                num_tokens=None if image is None else image.num_tokens,
                end=None if image is None else encoded.end(image),
            )
        )
    return Shown(key=key, encoded=encoded, record=record, pictures=pictures, encoder=encoder)


def _images(encoder: ImageTextEncoder, record: Record, part: int) -> list[tuple[str | None, tuple[int, int] | None]]:
    """Members and sizes, in document order; in order of names if the template cannot read the record."""
    from megaresume.encoding.images.pieces import image_members

    try:
        return [(member, (width, height)) for member, width, height, _ in encoder.images(record, part)]
    except CorpusError:
        return [(member, None) for member in image_members(record)]


class Decoder:
    """Adds ``text`` to the segments of samples, by the tokenizer of their corpus; without it, ``token_ids``.

    Args:
        sources: the corpora, by name.
        tokenizer: that of one or more corpora; None: only byte tokens can be decoded.
        note: called with a sentence if token ids are used instead.
        marks: put `TRAINED` around trained text, for sources that know it.

    Raises:
        UsageError: the tokenizer is not that of any corpus.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        tokenizer: Tokenizer | None,
        note: Callable[[str], object],
        *,
        marks: bool = False,
    ) -> None:
        known: dict[str, Tokenizer] = {ByteTokenizer().fingerprint(): ByteTokenizer()}
        with_images = {name: source for name, source in sources.items() if is_document_source(source)}
        texts = {name: source for name, source in sources.items() if name not in with_images}
        fingerprints = {name: _record(source) for name, source in texts.items()}
        if tokenizer is not None:
            known[tokenizer.fingerprint()] = tokenizer
            recorded = {r["fingerprint"]: r for r in fingerprints.values() if r is not None}
            if recorded and tokenizer.fingerprint() not in recorded:
                raise UsageError(
                    f"{tokenizer.name} is not the tokenizer of any corpus",
                    found=f"fingerprint {tokenizer.fingerprint()}",
                    expected=", ".join(f"{f} ({r.get('name')})" for f, r in recorded.items()),
                    action="pass the --tokenizer, and the --eod-token if any, that megaresume prepare was given",
                )
        self._sources = sources
        self._marks = marks
        self._with_images = with_images
        self._tokenizers: dict[str, Tokenizer | None] = {
            # A corpus built by another program does not record its tokenizer: trust the user.
            name: known.get(record["fingerprint"]) if record is not None else tokenizer
            for name, record in fingerprints.items()
        } | {name: getattr(source.encoder, "tokenizer", None) for name, source in with_images.items()}
        without = [name for name, found in self._tokenizers.items() if found is None]
        if without:
            names = {str((fingerprints.get(name) or {}).get("name", "not recorded")) for name in without}
            note(
                f"token ids for {', '.join(without)}: the tokenizer ({', '.join(sorted(names))}) is not at hand; "
                "--tokenizer tokenizer.json gives it"
            )

    def rows(self, piece: TracePiece) -> Iterator[dict[str, Any]]:
        """The rows of `TracePiece.rows`; an image-text document has its ``fault`` if a policy was applied.

        Segments of sources that know which tokens are trained have ``trained``: runs of tokens of the document.

        Raises:
            CorpusError: a corpus is damaged, or was made with another tokenizer.
        """
        for row in piece.rows():
            for segment in row["segments"]:
                if segment["source"] in self._with_images:
                    segment.update(self._document(piece, segment))
                    continue
                tokens = self._sources[segment["source"]].read(
                    segment["document"], segment["offset"], segment["length"]
                )
                tokenizer = self._tokenizers[segment["source"]]
                spans = spans_of(self._sources[segment["source"]], np.array([segment["document"]]))
                trained = None if spans is None else spans.mask(0, segment["offset"], segment["length"])
                if trained is not None:
                    segment["trained"] = _runs(trained, segment["offset"])
                if tokenizer is None:
                    segment["token_ids"] = tokens.tolist()
                else:
                    segment["text"] = decode_marked(tokenizer, tokens, trained if self._marks else None)
            yield row

    def _document(self, piece: TracePiece, segment: Mapping[str, Any]) -> dict[str, Any]:
        """The image-text document of a segment, which is always whole."""
        name = segment["source"]
        source = of_stage(self._with_images[name], name, piece.config)
        key = Key(seed=piece.config.seed, source=name, document=segment["document"], epoch=segment["epoch"])
        shown = show(source, key)
        tokenizer, fault = self._tokenizers[name], shown.fault()
        found: dict[str, Any] = {} if fault is None else {"fault": fault}
        found["trained"] = _runs(shown.encoded.trained, 0)
        if tokenizer is None:
            return found | {"token_ids": shown.encoded.tokens.tolist()}
        return found | {"text": shown.text(tokenizer, marks=self._marks)}


def _runs(trained: npt.NDArray[np.bool_], offset: int) -> list[list[int]]:
    return [[offset + first, offset + stop] for first, stop in runs_of(trained)]


def _record(source: object) -> Mapping[str, Any] | None:
    """The tokenizer recorded beside a corpus."""
    inner = getattr(source, "source", source)  # a part of a split corpus is a view of it
    found: Mapping[str, Any] | None = getattr(inner, "tokenizer", None)
    return found if isinstance(found, Mapping) else None
