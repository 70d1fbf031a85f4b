"""Corpora that are not what they were: grown since a state was made, or gone.

    sources:
      web: {path: corpora/web, append: next_epoch}    # or now

A corpus that has grown is declared, and must still have the corpus of before at its beginning; what comes of it is for
``order.py`` to say. A source that the data config of today has no more keeps its place as an `AbsentSource`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from megaresume.stream.config import Append, StreamConfig
from megaresume.stream.errors import CorpusError, StateError
from megaresume.stream.fingerprints import check_fingerprint, differences, listing
from megaresume.stream.state import Fingerprint, StreamState

#: (source, documents) -> the fingerprint of its first documents, as if there were no more.
FirstOf = Callable[[str, int], Fingerprint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A corpus that has grown."""

    source: str
    append: Append
    #: documents.
    before: int
    after: int

    def __str__(self) -> str:
        when = "at once" if self.append == "now" else "from its next epoch on"
        return f"source '{self.source}' grew from {self.before:,} to {self.after:,} documents; the new ones come {when}"


def check_corpora(
    config: StreamConfig,
    names: Mapping[str, str],
    fingerprints: Mapping[str, Fingerprint],
    state: StreamState,
    first_of: FirstOf | None,
) -> list[Growth]:
    """Refuse a corpus that is not the one of the state, unless it has grown and that is declared.

    Args:
        config: of today.
        names: of its sources -> those that the run knows them by.
        fingerprints: by the names of today.
        state: of the run.
        first_of: by the names of today; None: no corpus is at hand.

    Returns:
        Those that have grown.

    Raises:
        StateError: naming what differs.
    """
    grown = []
    for entry in config.sources:
        name, now = names.get(entry.name, entry.name), fingerprints.get(entry.name)
        before = state.fingerprints.get(name)
        if name not in state.sources or now is None or now == before:
            continue
        if before is None or now.documents <= before.documents or entry.append is None or first_of is None:
            check_fingerprint(name, before, now)
            continue
        _check_beginning(name, before, first_of(entry.name, before.documents), now.documents)
        grown.append(Growth(source=name, append=entry.append, before=before.documents, after=now.documents))
    return grown


def _check_beginning(name: str, before: Fingerprint, now: Fingerprint, documents: int) -> None:
    differ = list(differences(asdict(now), asdict(before)))
    if not differ:
        return
    raise StateError(
        f"source '{name}' has grown, but it does not begin with the corpus that the state was made with",
        found=f"of the first {before.documents:,} of {documents:,} documents "
        + listing((f"{name}.{field}", found) for field, found, _ in differ),
        expected=listing((f"{name}.{field}", expected) for field, _, expected in differ),
        cause="new documents were put before or between the old ones, old ones were changed, or a different tokenizer "
        "made the new corpus",
        action=f"append new documents after the old ones; or keep '{name}' as it was and add the new data as another "
        "source",
    )


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
