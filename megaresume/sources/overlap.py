"""Which documents of which files a source is, and whether two sources share some: held-out data must not leak."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from pathlib import Path

from megaresume.sources.indexed import IndexedSource
from megaresume.sources.python import PythonSource
from megaresume.sources.split import RangeSource
from megaresume.stream.errors import ConfigError

__all__ = ["Extent", "check_no_overlap", "extent_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Documents [start, stop) of a corpus."""

    #: what the corpus lies in: files by device and number, so that links are seen through; URLs; an object.
    corpus: frozenset[object]
    #: for people.
    name: str
    start: int
    stop: int

    def shares(self, other: Extent) -> bool:
        """Whether a document may be in both. Of shards that two corpora have in part in common: yes."""
        if not self.corpus & other.corpus:
            return False
        return self.corpus != other.corpus or (self.start < other.stop and other.start < self.stop)

    def __str__(self) -> str:
        return f"documents {self.start:,} to {self.stop - 1:,} of {self.name}"


def extent_of(source: object) -> Extent:
    """Where the documents of an opened source lie."""
    start, stop = 0, len(source) if isinstance(source, Sized) else 0
    while isinstance(source, RangeSource):
        start, stop = start + source.start, stop + source.start
        source = source.source
    if isinstance(source, IndexedSource):
        path = Path(f"{source.prefix}.bin")
        return Extent(corpus=frozenset([_file(path)]), name=str(source.prefix), start=start, stop=stop)
    index = getattr(source, "index", None)
    if index is not None and hasattr(index, "shards"):
        from megaresume.sources.shards.paths import resolved

        shards = [resolved(shard.path, index.path) for shard in index.shards]
        corpus = frozenset(s if "://" in s else _file(Path(s)) for s in shards)
        return Extent(corpus=corpus, name=str(index.path), start=start, stop=stop)
    thing = source.thing if isinstance(source, PythonSource) else source
    return Extent(corpus=frozenset([("object", id(thing))]), name=f"a {type(thing).__name__}", start=start, stop=stop)


def _file(path: Path) -> object:
    try:
        found = os.stat(path)
    except OSError:
        return str(path.absolute())
    return found.st_dev, found.st_ino


def check_no_overlap(training: Mapping[str, object], held_out: Mapping[str, object], name: str) -> None:
    """Refuse a validation set that holds documents which are trained on.

    Args:
        training: all sources of the training, by name; also those of weight 0.
        held_out: the sources of the set, by name.
        name: of the set.

    Raises:
        ConfigError: naming both ranges.
    """
    trained = {source: extent_of(opened) for source, opened in training.items()}
    for source, opened in held_out.items():
        extent = extent_of(opened)
        for other, of_training in trained.items():
            if extent.shares(of_training):
                raise ConfigError(
                    f"validation set '{name}' holds documents that are trained on",
                    found=f"its source '{source}': {extent}; source '{other}' of the training: {of_training}",
                    expected="held-out documents in no source of the training",
                    cause="the same corpus in both, and one of them without the split that parts them",
                    action=f"give both the same split (split: 969,30,1), or write overlap: allow into the set '{name}'",
                )
