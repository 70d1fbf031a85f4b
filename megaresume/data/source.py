"""What loading asks of a source: the lengths that the stream plans with, and the tokens themselves.

Source           documents by number
  TokenSource      all tokens in one array: a compiled loop copies them
  DocumentSource   tokens and images of one document together, with randomness that is keyed by what it is

What a `DocumentSource` gives is in `megaresume.encoding.images.document`.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from megaresume.encoding.images.document import EncodedDocument, Key
from megaresume.stream.state import Fingerprint


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

    def fingerprint(self, *, first: int | None = None, recompute: bool = False) -> Fingerprint:
        """What the source is: documents, tokens, hash of the lengths, tokenizer, contents.

        Args:
            first: of its first documents only, as if there were no more; None: of all.
            recompute: believe nothing that was kept from an earlier time.
        """
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


class VisionEncoder(Protocol):
    """What loading must know of the encoder of a `DocumentSource` before the first image is read."""

    @property
    def image_token_id(self) -> int:
        """The token that stands where features go."""
        ...

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """Of one tile or patch: ``EncodedImage.pixels`` without its first axis. The same for every image."""
        ...


@runtime_checkable
class DocumentSource(Source, Protocol):
    """A source of image-text documents, which are read whole."""

    @property
    def whole(self) -> bool:
        """True: its documents must never be cut."""
        ...

    @property
    def encoder(self) -> VisionEncoder:
        """Makes its documents."""
        ...

    def encoded(self, i: int, key: Key) -> EncodedDocument:
        """Document i, exactly ``length(i)`` tokens. Randomness comes from ``key`` alone.

        Raises:
            CorpusError: it cannot be read, or is not as the index says, and the policy is ``error``.
        """
        ...


DOCUMENT_MEMBERS = ("__len__", "length", "lengths", "get", "read", "fingerprint", "whole", "encoder", "encoded")


def is_document_source(thing: object) -> TypeGuard[DocumentSource]:
    """`isinstance` for `DocumentSource` that does not ask for the encoder, which may have a tokenizer to build."""
    return all(inspect.getattr_static(thing, member, None) is not None for member in DOCUMENT_MEMBERS)
