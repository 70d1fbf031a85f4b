"""Sources that are not files of a corpus: any Python object, and ``kind: items``, which only knows the item numbers.

An object needs ``__len__``, ``length(i)`` and ``get(i)``:

    class Lines:
        def __init__(self, lines): self.lines = lines
        def __len__(self): return len(self.lines)
        def length(self, i): return len(self.lines[i])
        def get(self, i): return np.frombuffer(self.lines[i].encode("ascii"), np.uint8)

Optional, for speed: ``lengths(ids)`` (int64[n] to int64[n]), ``read(i, offset, length)``, ``fingerprint()``
(a `Fingerprint`, or a dict with its fields). Every answer of the object is checked: a wrong length would shift all
samples after it.
"""

from __future__ import annotations

import operator
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.data.indexed_documents import IndexedDocuments
from megaresume.data.source import (
    DOCUMENT_MEMBERS,
    BaseSource,
    Source,
    is_document_source,
    scan_fingerprint,
    sized_fingerprint,
)
from megaresume.data.split import RangeSource
from megaresume.stream.arrays import Int64Array
from megaresume.stream.errors import ConfigError, CorpusError
from megaresume.stream.state import Fingerprint

REQUIRED = ("__len__", "length", "get")


def as_source(thing: object, name: str = "source") -> Source:
    """A source unchanged; any other object as a `PythonSource`.

    Raises:
        ConfigError: the object lacks a method.
    """
    if isinstance(thing, IndexedDocuments | ItemNumbers | RangeSource | PythonSource) or is_document_source(thing):
        return thing
    if hasattr(thing, "encoded"):  # otherwise its images would be dropped silently
        missing = [m for m in DOCUMENT_MEMBERS if not hasattr(thing, m)]
        raise ConfigError(
            f"source '{name}' has `encoded`, but lacks what a source of images needs",
            found=f"a {type(thing).__name__} without {', '.join(missing)}",
            expected="the members of megaresume.data.source.DocumentSource",
            action="add them to the class",
        )
    return PythonSource(thing, name=name)


class PythonSource(BaseSource):
    """A user's object; checks every answer.

    Args:
        thing: has ``__len__``, ``length(i)`` and ``get(i)``.
        name: for errors and progress.

    Raises:
        ConfigError: a method is missing.
    """

    def __init__(self, thing: Any, *, name: str = "source") -> None:
        # Special methods are looked up on the class, as len() does.
        missing = [m for m in REQUIRED if not callable(getattr(type(thing) if m == "__len__" else thing, m, None))]
        if missing:
            raise ConfigError(
                f"source '{name}' lacks methods",
                found=f"a {type(thing).__name__} without {', '.join(missing)}",
                expected="__len__() (documents), length(i) (tokens of document i), get(i) (its tokens)",
                action="add them to the class",
            )
        self.thing = thing
        self.name = name
        self._documents = len(thing)

    def __repr__(self) -> str:
        return f"PythonSource({self.thing!r}, name={self.name!r})"

    @property
    def _where(self) -> str:
        return f" in source '{self.name}'"

    def __len__(self) -> int:
        """The number of documents when the source was opened."""
        return self._documents

    def length(self, i: int) -> int:
        """Tokens of document i.

        Raises:
            IndexError: i is not in [0, len).
            CorpusError: the object returns something that is not a length.
        """
        self._check_id(i)
        length = self.thing.length(i)
        try:
            length = operator.index(length)
        except TypeError:
            raise self._bad_length(i, length) from None
        if length < 0:
            raise self._bad_length(i, length)
        return length

    def lengths(self, ids: Int64Array) -> Int64Array:
        """Tokens of each document: int64[n] to int64[n]; from the object's own ``lengths`` if it has one.

        Raises:
            IndexError: an id is not in [0, len).
            CorpusError: the object returns something that is not a length.
        """
        ids = np.asarray(ids, np.int64)
        own = getattr(self.thing, "lengths", None)
        if not callable(own):
            return np.fromiter((self.length(int(i)) for i in ids), np.int64, len(ids))
        lengths = np.asarray(own(self._check_ids(ids)))
        if lengths.shape != ids.shape or (lengths.dtype.kind not in "iu" and lengths.size):
            raise CorpusError(
                f"source '{self.name}': lengths(ids) answers with the wrong kind of array",
                found=f"shape {lengths.shape}, {lengths.dtype}",
                expected=f"shape {ids.shape}, int64",
                action="correct lengths(ids) of the class, or remove it: length(i) is enough",
            )
        if lengths.size and lengths.min() < 0:
            i = int(np.argmin(lengths))
            raise self._bad_length(int(ids[i]), int(lengths[i]))
        return lengths.astype(np.int64, copy=False)

    def get(self, i: int) -> npt.NDArray[Any]:
        """Tokens of document i, shape (length(i),), an integer dtype.

        Raises:
            IndexError: i is not in [0, len).
            CorpusError: they are not one-dimensional integers, or not ``length(i)`` of them.
        """
        return self._checked(i, self.thing.get(i), self.length(i), "get(i)")

    def read(self, i: int, offset: int, length: int) -> npt.NDArray[Any]:
        """`length` tokens of document i from token `offset` on; from the object's own ``read`` if it has one.

        Raises:
            IndexError: no such document, or the range leaves it.
            CorpusError: the object returns something else.
        """
        self._check_range(i, offset, length)
        own = getattr(self.thing, "read", None)
        if callable(own):
            return self._checked(i, own(i, offset, length), length, f"read(i, {offset}, {length})")
        return self.get(i)[offset : offset + length]

    def range_fingerprint(self, start: int, stop: int, *, recompute: bool = False) -> Fingerprint:
        """The fingerprint of a range: the object's own if the range is all documents; otherwise from every length.

        Args:
            start: first document.
            stop: one after the last.
            recompute: read every length even if the object has a fingerprint.

        Raises:
            CorpusError: the object returns something that is not a fingerprint, or not of this object.
        """
        own = getattr(self.thing, "fingerprint", None)
        given = self._checked_fingerprint(own()) if callable(own) else None
        if given is not None and stop - start == len(self) and not recompute:
            return given

        def read(i: int, offset: int, count: int) -> npt.NDArray[Any]:
            return self.read(start + i, offset, count)

        return scan_fingerprint(
            lambda ids: self.lengths(start + ids),
            stop - start,
            f"fingerprint of {self.name}",
            # If the object's fingerprint has no contents, do not read them: they may be expensive.
            read=read if given is None or given.contents is not None else None,
            tokenizer=None if given is None else given.tokenizer,
        )

    def _checked_fingerprint(self, given: Any) -> Fingerprint:
        try:
            print_ = given if isinstance(given, Fingerprint) else Fingerprint(**given)
            fits = (
                isinstance(print_.tokens, int)
                and print_.documents == len(self)
                and re.fullmatch("[0-9a-f]{32}", print_.lengths) is not None
                and isinstance(print_.tokenizer, str | None)
                and isinstance(print_.contents, str | None)
            )
        except TypeError:
            fits = False
        if not fits:
            raise CorpusError(
                f"source '{self.name}': fingerprint() answers with something else",
                found=f"{given!r:.200}",
                expected=f"documents ({len(self)}), tokens, lengths (32 hex digits: xxh3_128 of all lengths as "
                "little-endian int64), tokenizer and contents (text or None)",
                action="correct fingerprint() of the class, or remove it: it is then computed",
            )
        return print_

    def _checked(self, i: int, tokens: object, expected: int, call: str) -> npt.NDArray[Any]:
        array = np.asarray(tokens)
        if array.ndim != 1 or len(array) != expected or (array.dtype.kind not in "iu" and expected):
            raise CorpusError(
                f"source '{self.name}': {call} of document {i} does not fit",
                found=f"shape {array.shape}, {array.dtype}",
                expected=f"shape ({expected},), integers",
                cause="length(i) and get(i) disagree, or the data changed since the lengths were taken",
                action="correct the class: length(i) must be the number of tokens that get(i) returns",
            )
        return array

    def _bad_length(self, i: int, length: object) -> CorpusError:
        return CorpusError(
            f"source '{self.name}': bad length of document {i}",
            found=f"{length!r}",
            expected="a number of tokens, 0 or more",
            action="correct length(i) of the class",
        )


class ItemNumbers:
    """A source with one document per item of a dataset, of length 1 or with lengths from a file.

    Args:
        name: for errors.
        items: their number.
        contents: their hash, as the run knew it.
        lengths: .npy file, int64[items] tokens of each; None: 1.
        grouped: items are grouped by these lengths, and each item has length 1.
    """

    def __init__(
        self, name: str, items: Any, contents: Any = None, lengths: Any = None, *, grouped: bool = False
    ) -> None:
        is_count = isinstance(items, int) and not isinstance(items, bool) and items > 0
        if not (is_count and isinstance(contents, str | None) and isinstance(lengths, str | Path | None)):
            raise ConfigError(
                f"source '{name}' of kind items does not say how many there are",
                found=f"items {items!r}, contents {contents!r}, lengths {lengths!r}",
                expected="items: a number; contents: the hash that megaresume wrote; lengths, if items are packed: "
                "their file",
                action="take the data.yaml in the directory megaresume of the run's checkpoints",
            )
        self.name, self._contents = name, contents
        self._items: int = items
        known = None if lengths is None else _read_lengths(Path(lengths), name, items)
        self._lengths = None if grouped else known
        self._sizes = known if grouped else None

    def __len__(self) -> int:
        """The number of items."""
        return self._items

    def length(self, i: int) -> int:
        """The number of tokens of an item, or 1."""
        return 1 if self._lengths is None else int(self._lengths[i])

    def lengths(self, ids: Int64Array) -> Int64Array:
        """The tokens of each item, or 1: int64[n] to int64[n]."""
        return np.ones(len(ids), np.int64) if self._lengths is None else self._lengths[ids]

    def sizes(self, ids: Int64Array) -> Int64Array:
        """The sizes by which items are grouped: int64[n] to int64[n]."""
        return self.lengths(ids) if self._sizes is None else self._sizes[ids]

    def get(self, i: int) -> Int64Array:
        """Raise a CorpusError: only the training program has the dataset."""
        raise CorpusError(
            f"what item {i} of source '{self.name}' holds is not known here",
            found="kind: items, which knows numbers alone",
            expected="the dataset of the run",
            action="read it in Python: dataset[i]",
        )

    def read(self, i: int, offset: int, length: int) -> Int64Array:
        """Raise a CorpusError, as `get`."""
        return self.get(i)

    def fingerprint(self, *, first: int | None = None, recompute: bool = False) -> Fingerprint:
        """The fingerprint as the run knew it; without contents for its first items. ``recompute`` is ignored."""
        items = self._items if first is None else first
        contents = self._contents if items == self._items else None
        what = f"fingerprint of {self.name}"
        return replace(sized_fingerprint(self.lengths, self.sizes, items, what), contents=contents)


def _read_lengths(path: Path, name: str, items: int) -> Int64Array:
    try:
        lengths: Int64Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise CorpusError(
            f"the lengths of the items of source '{name}' cannot be read",
            found=f"{path}: {type(error).__name__}: {error}",
            expected="the file that the run wrote into its lengths_dir",
            cause="it was moved or deleted",
            action="correct lengths in the data.yaml; or start the run again, which writes it",
        ) from error
    if lengths.shape != (items,) or lengths.dtype != np.int64:
        raise CorpusError(
            f"these are not the lengths of source '{name}'",
            found=f"{lengths.dtype}{list(lengths.shape)} in {path}",
            expected=f"int64[{items}]",
            action="correct lengths in the data.yaml; or start the run again, which writes it",
        )
    return lengths
