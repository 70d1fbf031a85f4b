"""`ShardSource`: the image-text records of tar shards as documents, read by an index of `megaresume prepare`.

length(i)     tokens column of the index, cut as `too_long` says          planning: reads no shard
encoded(i)    index -> one range read of the shard -> record -> encoder -> exactly length(i) tokens
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.data.image_folder import Folder
from megaresume.data.inputs import resolved
from megaresume.data.record_index import IndexedFile, ShardIndex
from megaresume.data.shard_files import Place, RecordError, ShardFiles
from megaresume.data.source import BaseSource, scan_fingerprint
from megaresume.data.tar import content_hash, parse_record
from megaresume.stream.arrays import Int64Array
from megaresume.stream.errors import CorpusError
from megaresume.stream.state import Fingerprint

if TYPE_CHECKING:
    from megaresume.encoding.images.document import EncodedDocument, FaultPolicy, Key, Record
    from megaresume.encoding.images.encoder import ImageTextEncoder
    from megaresume.encoding.images.pixels import Levels

#: What happens to documents longer than `max_tokens`.
TooLong = Literal["error", "truncate", "drop"]

#: `num_images` of a record that could not be measured.
UNMEASURED = -1
SHOWN = 3
SCAN = 1 << 20
#: rows whose images are looked for if images are missing.
SOME = 8


class ShardSource(BaseSource):
    """Documents of tar shards. Safe to share between threads, to fork and to pickle.

    Args:
        index: path of the ``.shards.idx``, or the index.
        name: of the source, for errors.
        shards: paths of the shards, in the order of the index; by default those in the index.
        folder: directory of the images that rows of JSON lines name; by default the one in the index.
        policy: what happens to a record that differs from the index.
        max_tokens: length above which ``too_long`` applies; None: no limit.
        too_long: ``error``: refuse when the source is opened; ``truncate``: cut the text to max_tokens, and mask an
            image that does not fit whole; ``drop``: length 0, so that the stream skips it.
        augment: steps of augmentation, as in data.yaml.
        parts: name -> (first, stop) documents, for a data set that has its own split.

    Raises:
        ConfigError: an unknown policy or augmentation.
        CorpusError: the index is missing or damaged; the first or last shard is missing or has another size; a
            document is too long.
    """

    whole = True

    def __init__(
        self,
        index: str | Path | ShardIndex,
        *,
        name: str = "source",
        shards: Sequence[str] | None = None,
        folder: str | None = None,
        policy: FaultPolicy = "error",
        max_tokens: int | None = None,
        too_long: TooLong = "error",
        augment: object = None,
        parts: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.index = index if isinstance(index, ShardIndex) else ShardIndex(index)
        self.name = name
        self.policy = policy
        self.max_tokens = max_tokens
        self.too_long = too_long
        self.augment = augment
        self.parts = parts
        self.files = ShardFiles()
        self._scanned: dict[tuple[int, int], Fingerprint] = {}
        #: whether the lengths were verified by their hash.
        self._is_compared = False
        infos = self.index.files
        self._paths = [resolved(shard.path, self.index.path) for shard in infos] if shards is None else list(shards)
        self._tokens = self.index.column("tokens")
        self._limit = None if max_tokens is None or self.index.header["longest"] <= max_tokens else max_tokens
        # A wrong path shows at once; the other shards are checked when they are first read.
        self.files.check_all({self._paths[k]: infos[k].size for k in ((0, len(infos) - 1) if infos else ())})
        #: the folder of the images that JSON lines name.
        self._folder = Folder.of(self.index, folder, self.files)
        if self._folder is not None:
            self._folder.check()
        if augment is not None:
            from megaresume.encoding.images.rgb import augmentation_from_options

            augmentation_from_options(augment)
        if self._limit is not None and too_long == "error":
            raise self._too_long()

    def __repr__(self) -> str:
        return f"ShardSource({str(self.index.path)!r}: {len(self)} documents)"

    def __len__(self) -> int:
        """The number of documents: all records, also those of length 0."""
        return len(self.index)

    @property
    def _where(self) -> str:
        return f" in source '{self.name}'"

    @property
    def longest(self) -> int:
        """The number of tokens of the longest document, or the limit for all of them."""
        longest = int(self.index.header["longest"])
        return longest if self.max_tokens is None else min(longest, self.max_tokens)

    @functools.cached_property
    def encoder(self) -> ImageTextEncoder:
        """The encoder that the index was made with, with the augmentation of this source."""
        from megaresume.encoding.images.encoder import ImageTextEncoder

        return ImageTextEncoder(self.index.header["encoder"]["spec"]).augmented(self.augment)

    @property
    def levels(self) -> Levels | None:
        """The map from 8-bit levels of its images to pixels; None if there are no levels, or they are unknown."""
        return self.encoder.levels if type(self) is ShardSource else None

    def augmented(self, steps: object) -> ShardSource:
        """The same documents with these augmentation steps (None: without any).

        Raises:
            ConfigError: an unknown step or option, or a bad value.
        """
        other = copy.copy(self)
        other.augment = steps
        other.encoder = self.encoder.augmented(steps)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("encoder", "_tokens")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokens = self.index.column("tokens")

    def lengths(self, ids: Int64Array) -> Int64Array:
        """Tokens of each document: int64[n] to int64[n], in any order.

        Raises:
            IndexError: an id is not in [0, len).
            CorpusError: the index is damaged at one of them.
        """
        ids = self._check_ids(ids)
        lengths = self._tokens[ids].astype(np.int64)
        if lengths.size and lengths.min() < 0:
            i = int(ids[np.argmin(lengths)])
            raise self.index.damaged(f"document {i} of {int(lengths.min())} tokens")
        if self._limit is not None:
            lengths = np.where(lengths <= self._limit, lengths, self._limit if self.too_long == "truncate" else 0)
        return lengths

    def get(self, i: int) -> npt.NDArray[Any]:
        """The tokens of document i, shape (length(i),); see `encoded` for its images."""
        from megaresume.encoding.images.document import Key

        # Tokens do not depend on the key: augmentation preserves sizes.
        return self.encoded(i, Key(seed=0, source=self.name, document=i, epoch=0)).tokens

    def read(self, i: int, offset: int, length: int) -> npt.NDArray[Any]:
        """``length`` tokens of document i from token ``offset`` on.

        Raises:
            IndexError: no such document, or the range leaves it.
        """
        self._check_range(i, offset, length)
        return self.get(i)[offset : offset + length]

    def encoded(self, i: int, key: Key) -> EncodedDocument:
        """Document i, exactly ``length(i)`` tokens.

        Raises:
            IndexError: no such document.
            CorpusError: the record differs from the index and the policy is ``error``; or the whole shard is missing or
                different, which no policy covers.
            SetupError: the store does not answer.
        """
        from megaresume.encoding.images.document import encode_as_indexed, fit_document

        length = self.length(i)
        policy = self.policy
        record: Record | CorpusError
        changed: CorpusError | None = None
        if self.index.column("num_images")[i] == UNMEASURED:
            # Accepted as invalid when the index was made (--invalid): masked even if mended since, so that nothing
            # moves.
            policy, record = "mask", self._unmeasured(i)
        else:
            try:
                raw, same = self._compared(i)
                changed = None if same else _changed(raw)
                record = self._with_fields(raw)
            except RecordError as error:
                record = error
        indexed = int(self._tokens[i])
        try:
            document = encode_as_indexed(
                self.encoder, record, key, tokens=indexed, policy=policy, changed=changed, part=self.part(i)
            )
        except CorpusError as error:
            raise (
                error if self._folder is None else self._folder.told(error, self._shard(i)[1], self._place(i))
            ) from error
        return document if length == indexed else fit_document(document, length, self.encoder.filler)

    def record(self, i: int) -> Record:
        """Record i as it is in its shard, with the fields of an Energon data set mapped.

        Raises:
            IndexError: no such document.
            RecordError: it is damaged.
            CorpusError: its shard is missing or different.
            SetupError: the store does not answer.
        """
        return self._with_fields(self._raw(i))

    def part(self, i: int) -> int:
        """The number of document i in its record: 0, unless the record was split into several documents.

        Raises:
            IndexError: no such document.
        """
        offset = self.index.column("offset")
        first, start = i, self._shard(i)[0].first
        while first > start and offset[first - 1] == offset[i]:
            first -= 1
        return i - first

    def places(self, i: int) -> list[Place]:
        """The place of document i, or of its images if it is a row; empty if it is not read.

        Raises:
            IndexError: no such document.
            CorpusError: the index is damaged.
        """
        unread = self.index.column("num_images")[i] == UNMEASURED or not self.length(i)
        if unread:
            return []
        place = self._place(i)
        if self._folder is None:
            return [place]
        return self._folder.places(self.files.fetch(place), place)

    def _compared(self, i: int) -> tuple[Record, bool]:
        """Record i, and whether it is the indexed one. If not, it is read again, bypassing the cache: the cache may
        have another version, and a store may have returned only a part of an image.
        """
        expected = int(self.index.column("content")[i])
        with contextlib.suppress(RecordError):
            if content_hash(raw := self._raw(i)) == expected:
                return raw, True
        raw = self._raw(i, again=True)
        return raw, content_hash(raw) == expected

    def _raw(self, i: int, *, again: bool = False) -> Record:
        place = self._place(i)
        data = self.files.fetch(place, again=again)
        if self._folder is not None:
            place = place._replace(path=self._shard(i)[1])
            return self._folder.record(data, place, again=again, others=self._some_images)
        return parse_record(data, place.path)

    def _some_images(self) -> list[Place]:
        """Images of measured rows, from all over the index."""
        rows = np.unique(np.linspace(0, len(self) - 1, SCAN).astype(np.int64))
        rows = rows[self.index.column("num_images")[rows] > 0]
        some = rows[np.linspace(0, len(rows) - 1, SOME).astype(np.int64)] if len(rows) else rows
        return [place for i in np.unique(some).tolist() for place in self.places(i)]

    def _place(self, i: int) -> Place:
        shard, path = self._shard(i)
        size = shard.size
        if self._folder is not None:
            path, size = self._folder.lines(path, size)
        return self.index.range_of(self.index.place(i), self.files, path, size)

    def _with_fields(self, record: Record) -> Record:
        fields = self._fields
        if fields is None:
            return record
        applied: Record = fields.apply(record)
        return applied

    def describe(self, i: int) -> dict[str, Any]:
        """The origin of document i, for people: shard, key, members with their bytes, images with their sizes."""
        shard, path = self._shard(i)
        place = {
            "shard": path,
            "record": i - shard.first,
            "part": self.part(i),
            "offset": int(self.index.column("offset")[i]),
            "bytes": int(self.index.column("nbytes")[i]),
            "image_tokens": int(self.index.column("image_tokens")[i]),
        }
        try:
            record = self.record(i)
        except CorpusError as error:
            return {**place, "error": error.headline}
        members = {name: len(content) for name, content in record.members.items()}
        return {**place, "key": record.key, "members": members, "images": _image_sizes(record)}

    def range_fingerprint(self, start: int, stop: int, *, recompute: bool = False) -> Fingerprint:
        """The fingerprint of documents start to stop; from the header of the index, unless documents are cut.

        The first call verifies the lengths, 4 bytes a document, by their hash. Besides the lengths, the fingerprint
        covers what made the documents: the encoder, and the contents of every record when the index was made. Every
        read checks that its record is still the same.

        Args:
            start: first document.
            stop: one after the last.
            recompute: read the whole index and verify its hashes.

        Raises:
            CorpusError: the index is damaged.
        """
        encoder = self.index.header["encoder"]["fingerprint"]
        if recompute:
            self.index.verify()
        elif not self._is_compared:
            # Nothing else verifies the length 0: the document is skipped, so no read compares it with its record.
            self.index.verify("tokens")
        self._is_compared = True
        for part in self.index.header["fingerprints"] if self._limit is None and not recompute else ():
            if part["range"] == [start, stop]:
                return Fingerprint(
                    documents=stop - start,
                    tokens=part["tokens"],
                    lengths=part["hash"],
                    tokenizer=encoder,
                    contents=part["contents"],
                )
        known = self._scanned.get((start, stop))
        if known is None or recompute:
            lengths = scan_fingerprint(
                lambda ids: self.lengths(ids + start), stop - start, f"fingerprint of {self.name}", tokenizer=encoder
            )
            contents = xxhash.xxh3_64_hexdigest(self.index.column("content")[start:stop].tobytes())
            known = self._scanned[start, stop] = replace(lengths, contents=contents)
        return known

    @functools.cached_property
    def _fields(self) -> Any:
        from megaresume.data.energon import Fields

        options = self.index.header.get("fields")
        return None if options is None else Fields(**options)

    def _shard(self, i: int) -> tuple[IndexedFile, str]:
        self._check_id(i)
        k = self.index.file_of(i)
        return self.index.files[k], self._paths[k]

    def _unmeasured(self, i: int) -> RecordError:
        known = {entry["document"]: entry["reason"] for entry in self.index.header["invalid"]["first"]}
        return RecordError(
            "a record that could not be measured when its index was made",
            found=known.get(i, "see the output of megaresume prepare"),
            expected="nothing: it was declared with --invalid mask",
        )

    def _too_long(self) -> CorpusError:
        assert self._limit is not None
        count = 0
        first: list[str] = []
        for start in range(0, len(self), SCAN):
            where = np.flatnonzero(self._tokens[start : start + SCAN] > self._limit) + start
            count += len(where)
            first += [f"document {i} with {int(self._tokens[i])}" for i in where[: SHOWN - len(first)].tolist()]
        return CorpusError(
            f"source '{self.name}' has documents that are too long",
            found=f"{count} of {len(self)} above max_tokens: {', '.join(first)}{' ...' if count > len(first) else ''}",
            expected=f"at most {self._limit} tokens",
            cause="long captions or conversations, or images of more tokens than a sample has room for",
            action=f"for source '{self.name}' say too_long: truncate (cut their text) or drop (leave them out), "
            "make the index again with template: {kind: interleaved, split: N} (pages alone), "
            f"or give max_tokens and seq_length of {self.index.header['longest']}",
        )


def _changed(record: Record) -> CorpusError:
    return CorpusError(
        f"record '{record.key}' is not the indexed one",
        found="another content, as long as the indexed one",
        expected="the same bytes",
        cause="a damaged disk, or shards of the same size that were written again, renamed or mixed up",
        action="put the shards back, or make the index again: megaresume prepare --overwrite",
    )


def _image_sizes(record: Record) -> dict[str, list[int] | str]:
    """Member -> [width, height] in pixels, or what is wrong with the image."""
    from megaresume.encoding.images.pieces import image_members
    from megaresume.encoding.images.rgb import ImageOptions, size_of

    sizes: dict[str, list[int] | str] = {}
    for member in image_members(record):
        try:
            sizes[member] = list(size_of(record.members[member], ImageOptions(), member))
        except CorpusError as error:
            sizes[member] = error.headline
    return sizes
