"""What the stream asks of a source: how many documents, how long each is; and one that is no longer there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from megaresume.stream.errors import CorpusError
from megaresume.stream.state import Fingerprint, StreamState

#: documents whose lengths are asked for at a time.
SCAN = 1 << 20


class LengthSource(Protocol):
    """Lengths by document number. Reading the documents is the business of ``data/``."""

    def __len__(self) -> int:
        """Documents."""
        ...

    def lengths(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of each document: int64[n] to int64[n]; ids in ``[0, len(self))``."""
        ...

    def fingerprint(self, *, first: int | None = None) -> Fingerprint | dict[str, Any]:
        """What the source is: the fields of `Fingerprint`.

        Args:
            first: of its first documents only, as if there were no more; None: of all.
        """
        ...


def chunks(source: LengthSource, size: int = 0) -> Iterator[npt.NDArray[np.int64]]:
    """The numbers of all documents in order, ``size`` (`SCAN`) at a time: int64[n] each."""
    size = size or SCAN
    for first in range(0, len(source), size):
        yield np.arange(first, min(first + size, len(source)), dtype=np.int64)


def count_trained(
    source: LengthSource,
    ids: npt.NDArray[np.int64],
    offsets: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Trained tokens among ``lengths[k]`` of each document from token ``offsets[k]`` on: int64[n] to int64[n].

    Raises:
        IndexError, CorpusError: as the source's ``trained_spans``; all are trained of a source without.
    """
    ask: Callable[[npt.NDArray[np.int64]], Any] | None = getattr(source, "trained_spans", None)
    spans = None if ask is None else ask(ids)
    return lengths if spans is None else np.asarray(spans.count(offsets, lengths), np.int64)


class AbsentSource:
    """A source that the data config of today no longer has, which keeps its place.

    Knows how many documents there were, and no more: nothing is drawn from it, nothing of it waits to be read.

    Args:
        name: of the source.
        state: that the run resumes from; None if there was none with the source.
    """

    def __init__(self, name: str, state: StreamState | None) -> None:
        self._name = name
        if state is None or name not in state.fingerprints:
            self._missing()
        self._fingerprint = state.fingerprints[name]

    def __len__(self) -> int:
        return self._fingerprint.documents

    def fingerprint(self, *, first: int | None = None) -> Fingerprint:
        """As it was."""
        if first is not None:
            self._missing()
        return self._fingerprint

    def lengths(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Never known.

        Raises:
            CorpusError: always.
        """
        self._missing()

    def _missing(self) -> NoReturn:
        raise CorpusError(
            f"source '{self._name}' is no longer in the data config",
            found="samples of a time when it was",
            expected=f"'{self._name}' with its path; weight 0 is enough",
            action=f"add '{self._name}' to the data config",
        )
