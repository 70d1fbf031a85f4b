"""``kind: items``: the items of a dataset by their numbers, for questions about a run whose dataset is not at hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megaresume.corpora.scan import scan_fingerprint
from megaresume.stream.errors import ConfigError, CorpusError
from megaresume.stream.state import Fingerprint

Int64Array = npt.NDArray[np.int64]


class ItemNumbers:
    """As many documents as a dataset has items, of length 1 or of those in a file.

    Args:
        name: for errors.
        items: how many.
        contents: their hash, as the run knew it.
        lengths: .npy file, int64[items] tokens of each; None: 1.
    """

    def __init__(self, name: str, items: object, contents: object = None, lengths: object = None) -> None:
        if isinstance(items, bool) or not isinstance(items, int) or items < 1 or not isinstance(contents, str | None):
            raise _bad(name, items, contents, lengths)
        if not isinstance(lengths, str | Path | None):
            raise _bad(name, items, contents, lengths)
        self.name, self._items, self._contents = name, items, contents
        self._lengths = _read_lengths(Path(lengths), name, items) if isinstance(lengths, str | Path) else None

    def __len__(self) -> int:
        """Items."""
        return self._items

    def length(self, i: int) -> int:
        """Tokens of an item, or 1."""
        return 1 if self._lengths is None else int(self._lengths[i])

    def lengths(self, ids: Int64Array) -> Int64Array:
        """Tokens of each, or 1: int64[n] to int64[n]."""
        return np.ones(len(ids), np.int64) if self._lengths is None else self._lengths[ids]

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
        return item_fingerprint(items, self._contents if items == self._items else None, self.name, self.lengths)


def _bad(name: str, *found: object) -> ConfigError:
    return ConfigError(
        f"source '{name}' of kind items does not say how many there are",
        found="items {!r}, contents {!r}, lengths {!r}".format(*found),
        expected="items: a number; contents: the hash that megaresume wrote; lengths, if items are packed: their file",
        action="take the data.yaml in the directory megaresume of the run's checkpoints",
    )


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
