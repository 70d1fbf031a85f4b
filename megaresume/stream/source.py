"""What the stream asks of a source: how many documents, how long each is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from megaresume.stream.state import Fingerprint

#: documents whose lengths are asked for at a time.
SCAN = 1 << 20


@runtime_checkable
class LengthSource(Protocol):
    """Lengths by document number. Reading the documents is the business of ``sources/``."""

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
