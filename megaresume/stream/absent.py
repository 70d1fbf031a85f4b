"""`AbsentSource`: the place of a source that the run had, and that the data config of today has no more."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import numpy.typing as npt

from megaresume.stream.errors import CorpusError
from megaresume.stream.state import Fingerprint, StreamState

__all__ = ["AbsentSource"]


class AbsentSource:
    """Knows how many documents there were, and no more: nothing is drawn from it, nothing of it waits to be read.

    Args:
        name: of the source.
        state: that the run goes on from; None: there was none with the source.
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
            f"source '{self._name}' is not in the data config any more",
            found="samples of a time when it was",
            expected=f"'{self._name}' with its path; weight 0 is enough",
            action=f"add '{self._name}' to the data config",
        )
