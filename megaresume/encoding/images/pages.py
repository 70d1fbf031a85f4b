"""A page longer than a document may be, to several documents: cut between its parts, an image never.

    t t I I I I t t t t I I I I t t E        of at most 9:   t t I I I I | t t t t | I I I I t t E

An image stays with the text after it while both fit into one document; a text longer than a document is cut where the
document is full. The documents, one after another, are the tokens of the page; only the last has its end of document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megaresume.encoding.images.templates import Image
from megaresume.stream.errors import CorpusError

#: tokens, and whether they are trained on.
Words = tuple[list[int], bool]
Part = Image | Words


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A text; or an image with the tokens around it, which is never cut."""

    parts: Sequence[Part]
    #: of all parts, those of the image too.
    tokens: int
    #: record and member, for errors; None: a text.
    image: str | None = None


def split_page(units: Sequence[Unit], limit: int) -> list[list[Part]]:
    """The documents of a page.

    Args:
        units: of the page, in order; at least one.
        limit: tokens of the longest document.

    Raises:
        CorpusError: an image of more than ``limit`` tokens.
    """
    documents: list[list[Part]] = [[]]
    used = 0
    for group in _groups(units):
        together = sum(unit.tokens for unit in group) <= limit
        for piece in [_joined(group)] if together else [piece for unit in group for piece in _pieces(unit, limit)]:
            if used + piece.tokens > limit:
                documents.append([])
                used = 0
            documents[-1] += piece.parts
            used += piece.tokens
    return documents


def _groups(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Images with the text after them."""
    group: list[Unit] = []
    for unit in units:
        group.append(unit)
        if unit.image is None:
            yield group
            group = []
    if group:
        yield group


def _joined(group: Sequence[Unit]) -> Unit:
    return Unit(parts=[part for unit in group for part in unit.parts], tokens=sum(unit.tokens for unit in group))


def _pieces(unit: Unit, limit: int) -> Iterator[Unit]:
    """The unit, if it is not too long; a text in pieces."""
    if unit.tokens <= limit:
        yield unit
        return
    if unit.image is not None:
        raise CorpusError(
            f"{unit.image} does not fit into a document",
            found=f"{unit.tokens} tokens, with those around it",
            expected=f"at most {limit}, by template.split",
            action="give the processor a smaller max_pixels or max_tiles, or raise template.split",
        )
    for part in unit.parts:
        assert isinstance(part, tuple)
        ids, is_trained = part
        for start in range(0, len(ids), limit):
            piece = ids[start : start + limit]
            yield Unit(parts=[(piece, is_trained)], tokens=len(piece))
