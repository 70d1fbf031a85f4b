"""``kind: items``: the items of a dataset by their numbers, for questions about a run whose dataset is not at hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from megaresume.corpora.scan import scan_fingerprint
from megaresume.stream.errors import ConfigError, CorpusError
from megaresume.stream.state import Fingerprint

Int64Array = npt.NDArray[np.int64]


class ItemNumbers:
    """As many documents of length 1 as a dataset has items.

    Args:
        name: for errors.
        items: how many.
        contents: their hash, as the run knew it.
    """

    def __init__(self, name: str, items: object, contents: object = None) -> None:
        if isinstance(items, bool) or not isinstance(items, int) or items < 1 or not isinstance(contents, str | None):
            raise ConfigError(
                f"source '{name}' of kind items does not say how many there are",
                found=f"items {items!r}, contents {contents!r}",
                expected="items: a number, and contents: the hash that megaresume wrote",
                action="take the data.yaml in the directory megaresume of the run's checkpoints",
            )
        self.name, self._items, self._contents = name, items, contents

    def __len__(self) -> int:
        """Items."""
        return self._items

    def length(self, i: int) -> int:
        """1."""
        return 1

    def lengths(self, ids: Int64Array) -> Int64Array:
        """1 for each: int64[n] to int64[n]."""
        return np.ones(len(ids), np.int64)

    def get(self, i: int) -> Int64Array:
        """Raise a CorpusError: only the program that trains has the dataset."""
        raise CorpusError(
            f"what item {i} of source '{self.name}' holds is not known here",
            found="kind: items, which knows numbers alone",
            expected="the dataset of the run",
            action="read it in Python: dataset[i]",
        )

    def read(self, i: int, offset: int, length: int) -> Int64Array:
        """As `get`."""
        return self.get(i)

    def fingerprint(self, *, first: int | None = None, recompute: bool = False) -> Fingerprint:
        """As the run knew it; of its first items the contents are not known. ``recompute`` makes no difference."""
        items = self._items if first is None else first
        return item_fingerprint(items, self._contents if items == self._items else None, self.name)


def item_fingerprint(
    items: int, contents: str | None, name: str, lengths: Callable[[Int64Array], Int64Array] | None = None
) -> Fingerprint:
    """Of so many documents.

    Args:
        items: how many.
        contents: hash of what they hold; None: not known.
        name: for the progress.
        lengths: int64[n] numbers to int64[n] tokens; None: 1 each.
    """
    known = lengths or (lambda ids: np.ones(len(ids), np.int64))
    print_ = scan_fingerprint(known, items, f"fingerprint of {name}")
    return Fingerprint(documents=items, tokens=print_.tokens, lengths=print_.lengths, contents=contents)
