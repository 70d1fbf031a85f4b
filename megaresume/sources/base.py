"""What loading asks of a source: the lengths that the stream plans with, and the tokens themselves."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from megaresume.stream.state import Fingerprint

__all__ = ["Source", "TokenSource"]


@runtime_checkable
class Source(Protocol):
    """Documents by number: what every opened source has. A user's object needs less: see `PythonSource`."""

    def __len__(self) -> int:
        """Documents."""
        ...

    def length(self, i: int) -> int:
        """Tokens of document i."""
        ...

    def lengths(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of each document: int64[n] to int64[n]."""
        ...

    def get(self, i: int) -> npt.NDArray[Any]:
        """Tokens of document i, shape (length(i),)."""
        ...

    def read(self, i: int, offset: int, length: int) -> npt.NDArray[Any]:
        """`length` tokens of document i from token `offset` on."""
        ...

    def fingerprint(self, *, recompute: bool = False) -> Fingerprint:
        """What the source is: documents, tokens, hash of the lengths, tokenizer."""
        ...


@runtime_checkable
class TokenSource(Source, Protocol):
    """A source whose tokens lie in one array, so that a kernel can copy them without a call for each document."""

    @property
    def token_view(self) -> npt.NDArray[Any]:
        """All tokens, one-dimensional, read-only."""
        ...

    def token_starts(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where each document starts in `token_view`: int64[n] to int64[n], in tokens."""
        ...
