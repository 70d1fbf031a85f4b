"""Hashes of what samples and documents hold, read from the corpora: not of what their indexes say.

A sample is hashed as it is trained: its tokens at their places, padding, the pixels of its images, and its loss mask if
asked for. A document is hashed as it lies there: its tokens, and which are trained if the corpus says it; or the record
of a source that has records (`record(i)`: the bytes of the members of an image-text record), whenever its first segment
comes by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.batches.arrays import Arrays
from megaresume.batches.assemble import Assembler
from megaresume.batches.documents import Images
from megaresume.checkpoint.session.rank_log import hash_rows
from megaresume.data.source import Source
from megaresume.data.spans import spans_of
from megaresume.stream.errors import CorpusError
from megaresume.stream.planning.kernel import DOCUMENT, LENGTH, OFFSET, SOURCE
from megaresume.trace.documents import of_stage
from megaresume.trace.replan import Planned

#: Samples read at a time: a step of a large run does not have to fit into memory.
CHUNK = 256


@dataclass
class DocumentDigest:
    """What was read of one source."""

    #: of which the beginning was.
    documents: int = 0
    #: xxh3_128 over the hashes of the segments, in the order of the stream.
    _hasher: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)

    def add(self, value: int, *, begins: bool) -> None:
        """One more segment; whether it is the first of its document."""
        self.documents += begins
        self._hasher.update(value.to_bytes(8, "little"))

    @property
    def digest(self) -> str:
        """32 hex digits: the same wherever the same segments are read in the same order."""
        return self._hasher.hexdigest()


class Contents:
    """Reads the corpora of a run.

    Args:
        names: of the sources, in the order of the stream.
        sources: those, opened; a source that is gone must not be asked for.
    """

    def __init__(self, names: Sequence[str], sources: Sequence[Any]) -> None:
        self._names = list(names)
        self._sources: list[Source] = list(sources)
        self._assemblers: dict[str, Assembler] = {}
        #: by source, what `documents` has read.
        self.digests: dict[str, DocumentDigest] = {}

    def samples(self, parts: Sequence[Planned], pad_id: int, *, masks: bool = False) -> npt.NDArray[np.uint64]:
        """What every sample holds: uint64[n], as `hash_rows`.

        Args:
            parts: consecutive samples.
            pad_id: token at places without a document.
            masks: hash which labels count, too.

        Raises:
            CorpusError: a document is damaged, or not as long as the index says.
        """
        hashes = []
        for part in parts:
            for first in range(part.plan.first, part.plan.stop, CHUNK):
                plan = part.plan.slice(first, min(first + CHUNK, part.plan.stop))
                assembler = self._assembler(part, pad_id)
                arrays, images = Arrays.empty(len(plan), assembler.seq_length), Images()
                assembler.fill(plan, arrays, images, [])
                rows = [position[0] for position in images.positions]
                pixels = zip(rows, images.pixels, strict=True)
                hashes.append(hash_rows(arrays.tokens, pixels, arrays.loss_mask if masks else None))
        return np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)

    def _assembler(self, part: Planned, pad_id: int) -> Assembler:
        config = part.config
        augment = {source.name: list(source.augment) for source in config.sources}
        key = repr((config.seq_length, config.packing.align, pad_id, augment))
        if key not in self._assemblers:
            self._assemblers[key] = Assembler(
                [of_stage(s, name, config) for s, name in zip(self._sources, self._names, strict=True)],
                seq_length=config.seq_length,
                align=config.packing.align,
                pad_id=pad_id,
                seed=config.seed,
                names=self._names,
            )
        return self._assemblers[key]

    def documents(self, parts: Sequence[Planned]) -> None:
        """Hash every segment of these samples; of shards, every record.

        Raises:
            CorpusError: one cannot be read, or is not as long as the index says.
        """
        for part in parts:
            table = part.plan.table
            for row in table:
                name, source = self._names[int(row[SOURCE])], self._sources[int(row[SOURCE])]
                value = _hash(source, name, int(row[DOCUMENT]), int(row[OFFSET]), int(row[LENGTH]))
                self.digests.setdefault(name, DocumentDigest()).add(value, begins=bool(row[OFFSET] == 0))


def _hash(source: Source, name: str, document: int, offset: int, length: int) -> int:
    record = getattr(source, "record", None)
    if record is not None:
        hasher = xxhash.xxh3_64()
        for member, content in sorted(record(document).members.items()):
            # Lengths are written out so that no two records share an encoding.
            hasher.update(f"{len(member.encode())} {member} {len(content)} ".encode() + content)
        return int(hasher.intdigest())
    tokens = source.read(document, offset, length)
    if len(tokens) != length:
        raise CorpusError(
            f"document {document} of source '{name}' is not as long as the index says",
            found=f"{len(tokens)} tokens from token {offset} on",
            expected=f"{length} tokens",
            cause="the file of tokens was cut short or exchanged",
            action="copy the corpus again",
        )
    hasher = xxhash.xxh3_64(np.ascontiguousarray(tokens, dtype="<i8").data)
    spans = spans_of(source, np.array([document]))
    if spans is not None:
        hasher.update(spans.mask(0, offset, length).data)
    return hasher.intdigest()
