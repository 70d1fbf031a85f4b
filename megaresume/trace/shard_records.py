"""Which record of which tar shard an image-text document is.

fill        from the index alone, for millions of segments: shard, number in it, images, image tokens
describe    from the record itself: its key, and every image with its size and tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megaresume.data.source import is_document_source
from megaresume.stream.errors import CorpusError

if TYPE_CHECKING:
    from megaresume.data.shard_source import ShardSource

Int64Array = npt.NDArray[np.int64]


def shard_source(source: object) -> tuple[ShardSource, int] | None:
    """The tar shards of a source, and the number there of its first document; None: it has none."""
    if not is_document_source(source):  # text has no need for what reads shards
        return None
    from megaresume.data.shard_source import ShardSource

    inner = getattr(source, "source", source)  # a part of a split is a view
    return (inner, int(getattr(source, "start", 0))) if isinstance(inner, ShardSource) else None


class ShardRecords:
    """The records of the documents of a run.

    Args:
        sources: of the run, in its order.
    """

    def __init__(self, sources: Sequence[object]) -> None:
        self._views = list(sources)
        found = {i: shard_source(source) for i, source in enumerate(sources)}
        self._sources = {i: one for i, one in found.items() if one is not None}
        #: of all sources, as their indexes call them.
        self.shards: list[str] = []
        self._first_shard: dict[int, int] = {}
        for i, (source, _) in self._sources.items():
            self._first_shard[i] = len(self.shards)
            self.shards += [shard.path for shard in source.index.shards]

    def __contains__(self, source: int) -> bool:
        """Whether the source with this number lies in tar shards."""
        return source in self._sources

    def fill(self, which: Int64Array, documents: Int64Array, out: Int64Array) -> None:
        """Write (number in ``shards``, record in the shard, images, image tokens), -1 for what is not known.

        Args:
            which: int64[s], number of the source.
            documents: int64[s].
            out: int64[s, 4].
        """
        out[:] = -1
        for i, (source, start) in self._sources.items():
            rows = np.flatnonzero(which == i)
            ids = documents[rows] + start
            shard = source.index.column("shard")[ids].astype(np.int64)
            firsts = np.array([info.first for info in source.index.shards], np.int64)
            columns = [shard + self._first_shard[i], ids - firsts[shard]]
            columns += [source.index.column(name)[ids].astype(np.int64) for name in ("num_images", "image_tokens")]
            out[rows] = np.stack(columns, axis=1)

    def place(self, source: int, document: int) -> dict[str, Any]:
        """As `fill`, of one document, as plain JSON; nothing for a document of another source."""
        if source not in self._sources:
            return {}
        out = np.empty((1, 4), np.int64)
        self.fill(np.array([source]), np.array([document]), out)
        shard, record, num_images, image_tokens = out[0].tolist()
        images = None if num_images < 0 else num_images
        return {
            "shard": self.shards[shard],
            "record": record,
            "num_images": images,
            "image_tokens": image_tokens,
        }

    def describe(self, source: int, document: int) -> dict[str, Any]:
        """The key and the images (member, pixels, tokens) of a document, in its order; or the ``error``.

        Raises:
            SetupError: the store of its shard does not answer.
        """
        if source not in self._sources:
            return {}
        shards, start = self._sources[source]
        try:
            record = shards.record(start + document)
        except CorpusError as error:
            return {"key": None, "images": [], "error": error.headline}
        try:
            found = shards.encoder.images(record, shards.part(start + document))
        except CorpusError as error:
            return {"key": record.key, "images": [], "error": error.headline}
        names = ("member", "width", "height", "tokens")
        return {"key": record.key, "images": [dict(zip(names, image, strict=True)) for image in found]}


def record_words(row: Mapping[str, Any]) -> str:
    """What `ShardRecords` says of a document, for people: ``(pages-0.tar #3, images: 2 of 40 tokens)``."""
    if "shard" not in row:
        return ""
    place = f"{row['shard']} #{row['record']}"
    if "key" not in row:
        count = "?" if row["num_images"] is None else row["num_images"]
        return f" ({place}, images: {count} of {row['image_tokens']} tokens)"
    words = [f"{place} '{row['key']}'" if row["key"] is not None else place, image_words(row["images"])]
    return f" ({', '.join(word for word in [*words, row.get('error', '')] if word)})"


def image_words(images: Sequence[Mapping[str, Any]]) -> str:
    """``0.png 384x256 120 tokens, 1.png ...``."""
    return ", ".join(f"{i['member']} {i['width']}x{i['height']} {i['tokens']} tokens" for i in images)
