"""Whether anything of a source is left where documents of it are skipped: asked where the skip is declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megaresume.stream.errors import ConfigError
from megaresume.stream.planning.stages import Course
from megaresume.stream.skips import DocumentList
from megaresume.stream.source import LengthSource
from megaresume.stream.state import StreamState

#: Documents looked up at a time.
CHUNK = 1 << 12


def check_remaining(course: Course, sources: Mapping[str, LengthSource], state: StreamState | None) -> None:
    """Refuse lists of documents after which a source would have none, though its weight is positive.

    Epochs in which everything is skipped are passed over, as empty documents are, if others come after them; and a
    source that ends in them (``max_epochs``) ends as it is configured to, if anything of it was left before.

    Args:
        course: the stages and what is left out of them.
        sources: those that are here, by the names of the course.
        state: that the run goes on from; None: it begins.

    Raises:
        ConfigError: naming the source.
    """
    lists: dict[str, list[DocumentList]] = {}
    for skip in course.skips.documents:
        if skip.until is None and skip.documents.source in sources:
            lists.setdefault(skip.documents.source, []).append(skip.documents)
    for name, of_source in lists.items():
        epoch, cursor = 0, None if state is None else state.sources.get(name)
        if cursor is not None and cursor.exhausted:
            continue
        if cursor is not None:
            epoch = cursor.epoch
        drawn, end = _drawn(course, name, state)
        if not drawn:
            continue
        bounds = {epoch, *(b for documents in of_source for b in documents.epochs or () if b > epoch)}
        # From the last bound on every epoch is the same one, for ever.
        asked = [max(bounds)] if end is None else sorted(b for b in bounds if b < end)
        if not any(_remains(sources[name], [d for d in of_source if _holds(d, e)]) for e in asked):
            raise ConfigError(
                f"nothing of source '{name}' is left to train on",
                found=f"{len(sources[name]):,} documents; those that have a token are skipped: "
                f"{', '.join(map(str, of_source))}",
                expected="at least one document with a token in the epochs that the run goes through, since its weight "
                "is positive",
                action=f"give '{name}' weight 0, which begins a stage, or take documents off the list",
            )


def _drawn(course: Course, name: str, state: StreamState | None) -> tuple[bool, int | None]:
    """Whether a source is drawn in the stage at hand or a later one; the epoch with which it ends, if it does."""
    first = 0 if state is None else len(state.stages) - 1
    samples = 0 if state is None else state.samples
    drawn, ends = False, []
    for k in range(first, len(course.stages)):
        following = course.stages[k + 1] if k + 1 < len(course.stages) else None
        if following is not None and following.unit == "samples" and following.at <= samples:
            continue  # another stage begins right here
        entry = next(source for source in course.config(k).sources if source.name == name)
        if entry.weight > 0:
            drawn = True
            ends.append(None if entry.on_exhausted == "repeat" else entry.max_epochs)
    return drawn, None if None in ends else max((end for end in ends if end is not None), default=None)


def _holds(documents: DocumentList, epoch: int) -> bool:
    return documents.epochs is None or documents.epochs[0] <= epoch < documents.epochs[1]


def _remains(source: LengthSource, lists: Sequence[DocumentList]) -> bool:
    """Whether a document with a token is in none of the lists."""
    skipped = np.unique(np.concatenate([np.array(d.numbers(), np.int64) for d in lists] or [np.zeros(0, np.int64)]))
    for first in range(0, len(source), CHUNK):
        documents = np.arange(first, min(first + CHUNK, len(source)), dtype=np.int64)
        documents = documents[~np.isin(documents, skipped)]
        if len(documents) and (source.lengths(documents) > 0).any():
            return True
    return False
