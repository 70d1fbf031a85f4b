"""Finished blocks of a text corpus in the `WorkDirectory`: ``part-00000000`` and so on.

A part is a line of JSON, then int32[documents] lengths, then the tokens. It holds the position in the input where the
next block starts, so that finished blocks need not be read again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.corpora.prepare.blocks import Position
from megaresume.corpora.prepare.workdir import WorkDirectory

__all__ = ["SHOWN", "Part", "PartFiles"]

#: documents that are left out of which a part says where they are.
SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One finished block."""

    documents: int
    tokens: int
    #: documents without a token, left out.
    empty: int
    #: documents that are not UTF-8, and lines that are no JSON object with a text: left out.
    skipped: int
    bad_lines: int
    #: where the first few of both are, and what is wrong with them.
    first_left_out: list[str]
    #: of the documents, UTF-8 bytes.
    text_bytes: int
    #: read for it from disk (about).
    raw_bytes: int
    #: where the next block starts.
    end: Position
    #: bytes of a token.
    token_bytes: int
    #: xxh3_64 of lengths and tokens, 16 hex digits.
    hash: str


class PartFiles(WorkDirectory):
    """The parts of one corpus."""

    def write_part(
        self, index: int, lengths: npt.NDArray[np.int32], tokens: npt.NDArray[Any], *, end: Position, **counts: Any
    ) -> Part:
        """Write a part: all of it or nothing.

        Args:
            index: number of the block.
            lengths: tokens of each document, int32[documents].
            tokens: of all documents, in the type of the corpus.
            end: where the next block starts.
            counts: the other fields of `Part`.

        Raises:
            OSError: it cannot be written.
        """
        sizes = {"documents": len(lengths), "tokens": len(tokens), "token_bytes": tokens.dtype.itemsize, **counts}
        found = self.write(_name(index), {**sizes, "end": asdict(end)}, (lengths, tokens))
        return Part(**sizes, end=end, hash=found)

    def find_part(self, index: int) -> Part | None:
        """Part `index` if it is finished; a damaged one is removed."""
        head = self.find(_name(index), _body_bytes)
        return None if head is None else _part(head)

    def read_part(self, index: int) -> tuple[npt.NDArray[np.int32], bytes]:
        """Lengths and tokens of a finished part.

        Raises:
            CorpusError: it is damaged; it is removed, so that a rerun makes it again.
        """
        head, body = self.read(_name(index))
        split = 4 * head["documents"]
        return np.frombuffer(body, "<i4", head["documents"]), body[split:]


def _name(index: int) -> str:
    return f"part-{index:08d}"


def _part(head: Mapping[str, Any]) -> Part:
    return Part(**{**head, "end": Position(**head["end"])})


def _body_bytes(head: Mapping[str, Any]) -> int:
    part = _part(head)
    return 4 * part.documents + part.token_bytes * part.tokens
