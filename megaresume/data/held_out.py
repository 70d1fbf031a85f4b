"""Do sources share documents? Is held-out data trained on, or was it? Decided by files and by contents.

Files show whether two opened sources share a document. Contents show copies elsewhere, and sources that were removed
from the run, of which only the fingerprint is left.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megaresume.data.indexed_documents import IndexedDocuments
from megaresume.data.inputs import resolved
from megaresume.data.python_source import PythonSource
from megaresume.data.record_index import ShardIndex
from megaresume.data.row_source import RowSource
from megaresume.data.source import Source
from megaresume.data.split import RangeSource, range_of
from megaresume.stream.errors import ConfigError
from megaresume.stream.state import Fingerprint


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Documents [start, stop) of a corpus."""

    #: the corpus's identity: files by device and inode, so that links are followed; URLs; an object.
    corpus: frozenset[object]
    #: the name for people.
    name: str
    start: int
    stop: int
    #: the object that numbers its documents, if the files can be numbered in several ways: by order and by what counts
    #: as a document.
    numbered: object = None

    def shares(self, other: Extent) -> bool:
        """Whether a document may be in both. If they share some of their files: yes."""
        if not self.corpus & other.corpus:
            return False
        as_one = (self.corpus, self.numbered) == (other.corpus, other.numbered)
        return not as_one or (self.start < other.stop and other.start < self.stop)

    def __str__(self) -> str:
        return f"documents {self.start:,} to {self.stop - 1:,} of {self.name}"


def extent_of(source: object) -> Extent:
    """The documents of an opened source, by its files."""
    source, start, stop = whole_of(source)
    if isinstance(source, RowSource):
        files = _files(source.raw_files.paths)
        numbered = files, source.numbered
        return Extent(corpus=frozenset(files), name=str(source.prefix), start=start, stop=stop, numbered=numbered)
    if isinstance(source, IndexedDocuments):
        return Extent(corpus=frozenset([_file(source.tokens_path)]), name=str(source.prefix), start=start, stop=stop)
    index = getattr(source, "index", None)
    if isinstance(index, ShardIndex):
        files = _files([resolved(shard.path, index.path) for shard in index.files])
        return Extent(corpus=frozenset(files), name=str(index.path), start=start, stop=stop, numbered=files)
    thing = source.thing if isinstance(source, PythonSource) else source
    return Extent(corpus=frozenset([("object", id(thing))]), name=f"a {type(thing).__name__}", start=start, stop=stop)


def own_extent(source: object) -> Extent:
    """The documents of an opened source, by its corpus or index alone, without its raw files."""
    root, start, stop = whole_of(source)
    index = getattr(root, "index", None)
    path = root.tokens_path if isinstance(root, IndexedDocuments) else getattr(index, "path", None)
    if path is None:
        return extent_of(source)
    return Extent(corpus=frozenset([_file(Path(path))]), name=str(path), start=start, stop=stop)


def whole_of(source: object) -> tuple[object, int, int]:
    """The source behind a view, and the view's documents in it: [first, stop)."""
    start, stop = 0, len(source) if isinstance(source, Sized) else 0
    while isinstance(source, RangeSource):
        start, stop = start + source.start, stop + source.start
        source = source.source
    return source, start, stop


def _files(paths: Iterable[str]) -> tuple[object, ...]:
    return tuple(path if "://" in path else _file(Path(path)) for path in paths)


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
                    cause="both use the same corpus, and one lacks the split that separates them",
                    action=f"give both the same split (split: 969,30,1), or add overlap: allow to the set '{name}'",
                )


def check_not_seen(trained: Mapping[str, Fingerprint], held_out: Mapping[str, object], name: str) -> None:
    """Refuse a validation set with documents of a corpus that the run has trained on, wherever it was stored.

    Args:
        trained: fingerprints of every source that was ever trained on, by name.
        held_out: the sources of the set, by name.
        name: of the set.

    Raises:
        ConfigError: naming both sources.
    """
    for source, opened in held_out.items():
        known: dict[tuple[int, int], Fingerprint] = {}
        for other, print_ in trained.items():
            if (documents := _shared(opened, print_, known)) is not None:
                raise ConfigError(
                    f"validation set '{name}' holds documents that were trained on",
                    found=f"its source '{source}': {documents:,} documents of {extent_of(opened).name} are those of "
                    f"source '{other}' of the training, by their contents",
                    expected="held-out documents in no source that the run ever had",
                    cause=f"'{other}' was removed from the training, renamed or copied: the model has seen it",
                    action=f"measure another corpus, or add overlap: allow to the set '{name}'",
                )


def _shared(opened: object, print_: Fingerprint, known: dict[tuple[int, int], Fingerprint]) -> int | None:
    """How many documents a source shares with the range of its corpus that has this fingerprint; None: none.

    ``known``: a cache of fingerprints of ranges of the corpus.
    """
    root, start, stop = whole_of(opened)
    whole, count = cast(Source, root), print_.documents
    if print_.contents is None or not print_.tokens or count > len(whole):
        return None
    index: Any = getattr(whole, "index", None)
    parts = index.header["fingerprints"] if isinstance(index, ShardIndex) else ()
    for first in {0, *(part["range"][0] for part in parts if part["range"][1] - part["range"][0] == count)}:
        shared: int = min(first + count, stop) - max(first, start)
        if shared <= 0 or (isinstance(whole, IndexedDocuments) and whole.tokens_before(count) != print_.tokens):
            continue  # decided without a scan
        if (first, count) not in known:
            known[first, count] = range_of(whole, first, first + count).fingerprint()
        # Not the lengths: another encoder gives the same records other ones. For text, they follow from the contents.
        if known[first, count].contents == print_.contents:
            return shared
    return None
