"""The source of a stream: its number of documents, their lengths, and whether it is still the same.

An epoch of a source is made of pieces of at most a sample (`LongDocuments`), so that a long document is spread over it:

    documents           0   1 (of 2.5 samples)   2   3 (of 1.2 samples)   4
    first pieces        0   1                    2   3                    4        numbered as their documents
    later pieces            5  6                     7                             N.. , in the order of the documents

Only documents longer than a piece are listed, so memory grows with their number alone.

A source's identity is its fingerprint, which a resume compares with the one in the state. A corpus that grows must be
declared, and must still begin with the old corpus; ``order.py`` says how the new documents join:

    sources:
      web: {path: corpora/web, append: next_epoch}    # or now
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.stream.arrays import Int64Array
from megaresume.stream.config import SourceConfig, StreamConfig
from megaresume.stream.data_yaml import Append
from megaresume.stream.errors import CorpusError, StateError
from megaresume.stream.progress import Progress
from megaresume.stream.state import Fingerprint, SourceCursor, StreamState

#: documents whose lengths are asked for at a time.
SCAN = 1 << 20


class LengthSource(Protocol):
    """Lengths by document number. ``data/`` reads the documents themselves."""

    def __len__(self) -> int:
        """The number of documents."""

    def lengths(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The tokens of each document: int64[n] to int64[n]; ids in ``[0, len(self))``."""

    def fingerprint(self, *, first: int | None = None) -> Fingerprint | dict[str, Any]:
        """The identity of the source: the fields of `Fingerprint`.

        Args:
            first: of its first documents only, as if there were no more; None: of all.
        """


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
    """A source that is gone from the data config, which keeps its place.

    It only knows how many documents there were: nothing is drawn from it, and nothing of it waits to be read.

    Args:
        name: of the source.
        state: that the run resumes from; None if no state had the source.
    """

    def __init__(self, name: str, state: StreamState | None) -> None:
        self._name = name
        if state is None or name not in state.fingerprints:
            self._missing()
        self._fingerprint = state.fingerprints[name]

    def __len__(self) -> int:
        return self._fingerprint.documents

    def fingerprint(self, *, first: int | None = None) -> Fingerprint:
        """The fingerprint that was recorded."""
        if first is not None:
            self._missing()
        return self._fingerprint

    def lengths(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Refuse: the lengths are not known.

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


#: entries of a list that a look-up in its guide leaves to be searched: a page of memory.
STRIDE = 512


@dataclass(frozen=True, slots=True, eq=False)
class LongDocuments:
    """The documents of a source that are longer than a piece."""

    #: the documents, int64[k], ascending.
    ids: Int64Array
    #: int64[k]: later pieces of these documents, up to and with each.
    ends: Int64Array
    #: int64[k // STRIDE]: every so many of the ends, so that a look-up in a list on disk reads a page of it or two.
    guide: Int64Array

    @classmethod
    def of_lists(cls, ids: Int64Array, ends: Int64Array) -> LongDocuments:
        """Make one of lists in memory."""
        return cls(ids, ends, ends[STRIDE - 1 :: STRIDE].copy())

    def later(self, num_documents: int) -> int:
        """Later pieces of the first documents."""
        if not len(self.ids) or self.ids[-1] < num_documents:
            k = len(self.ids)  # all of them, nearly always: avoids a search through a list on disk
        else:
            k = int(self.ids.searchsorted(num_documents))
        return int(self.ends[k - 1]) if k else 0

    def between(self, start: int, stop: int) -> LongDocuments:
        """The long ones of documents ``start .. stop``, numbered from 0."""
        a, b = (int(k) for k in self.ids.searchsorted([start, stop]))
        if start == 0:
            return LongDocuments(self.ids[:b], self.ends[:b], self.guide[: b // STRIDE])
        before = int(self.ends[a - 1]) if a else 0
        return LongDocuments.of_lists(self.ids[a:b] - start, self.ends[a:b] - before)

    def of(self, document: int) -> range:
        """The later pieces of a document, counted from 0."""
        k = int(self.ids.searchsorted(document))
        if k == len(self.ids) or self.ids[k] != document:
            return range(0)
        return range(int(self.ends[k - 1]) if k else 0, int(self.ends[k]))


def find_long(source: LengthSource, piece: int, update: Progress = lambda documents: None) -> LongDocuments:
    """Look through all lengths of a source, a chunk at a time; ``update`` is told how many."""
    ids, later = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for documents in chunks(source):
        lengths = source.lengths(documents)
        found = np.flatnonzero(lengths > piece)
        ids.append(documents[found])
        later.append((lengths[found] - 1) // piece)
        update(len(lengths))
    return LongDocuments.of_lists(np.concatenate(ids), np.concatenate(later).cumsum())


def may_be_cut(source: LengthSource) -> bool:
    """Whether its documents may be cut: not if they hold images."""
    return not getattr(source, "whole", False)


class PieceLists:
    """The long documents of one source, by the length of a piece; each list is made when it is first needed.

    Args:
        source: asked by ``long_documents(piece)`` if it has it; otherwise for every length.
    """

    def __init__(self, source: LengthSource) -> None:
        self.source = source
        self._lists: dict[int, LongDocuments] = {}

    def of(self, piece: int) -> LongDocuments:
        """The documents longer than this many tokens."""
        if piece not in self._lists:
            known = getattr(self.source, "long_documents", None)
            self._lists[piece] = find_long(self.source, piece) if known is None else known(piece)
        return self._lists[piece]

    def num_pieces(self, num_documents: int, piece: int) -> int:
        """Pieces of the first documents; with a piece length of 0 (uncut), the number of documents."""
        return num_documents + (self.of(piece).later(num_documents) if piece else 0)


def hash_lengths(source: LengthSource) -> Fingerprint:
    """Read all lengths of a source: the slow way, for sources that do not know their fingerprint."""
    hasher, tokens = xxhash.xxh3_128(), 0
    for ids in chunks(source):
        lengths = np.ascontiguousarray(source.lengths(ids), dtype="<i8")
        hasher.update(lengths.data)
        tokens += int(lengths.sum())
    return Fingerprint(documents=len(source), tokens=tokens, lengths=hasher.hexdigest())


def fingerprint_of(source: LengthSource, name: str, *, first: int | None = None) -> Fingerprint:
    """The fingerprint that a source gives, checked against its length.

    Args:
        source, name: the source, and its name for errors.
        first: of its first documents only, as if there were no more: the source before it grew. None: of all.

    Raises:
        CorpusError: its number of documents is not the source's.
    """
    given = source.fingerprint() if first is None else source.fingerprint(first=first)
    fingerprint = given if isinstance(given, Fingerprint) else Fingerprint(**given)
    if fingerprint.documents != (len(source) if first is None else first):
        raise CorpusError(
            f"source '{name}' contradicts its fingerprint",
            found=f"{len(source)} documents",
            expected=f"{fingerprint.documents} documents, as its fingerprint says",
            cause="the corpus changed while it was read, or its sidecar file belongs to another corpus",
            action="remove the sidecar file (PREFIX.megaresume.json) and start again",
        )
    return fingerprint


def first_documents(source: LengthSource, name: str, documents: int) -> Fingerprint:
    """The fingerprint of what a source was before it grew.

    Raises:
        StateError: it is a part of a split, which moves when a corpus grows.
    """
    if getattr(source, "is_part", False):
        raise StateError(
            f"source '{name}' has grown, and is a part of a split",
            found=f"{len(source):,} documents of a corpus that has more, {documents:,} before",
            expected="the whole corpus as a source",
            cause="the boundaries of a split move when a corpus grows: what was held out before would be trained",
            action=f"keep '{name}' as it was and add the new documents as a separate source with its own split",
        )
    return fingerprint_of(source, name, first=documents)


def same_corpora(fingerprints: Mapping[str, Fingerprint]) -> list[str]:
    """A line for each corpus that several sources share, not counting sources of which only lengths are known."""
    names: dict[Fingerprint, list[str]] = {}
    for name, fingerprint in fingerprints.items():
        if fingerprint.contents is not None and fingerprint.tokens:
            names.setdefault(fingerprint, []).append(f"'{name}'")
    return [
        f"sources {', '.join(several[:-1])} and {several[-1]} are one corpus, by the lengths and contents of their "
        f"{fingerprint.documents:,} documents: each document is seen in an epoch of every one of them"
        for fingerprint, several in names.items()
        if len(several) > 1
    ]


def differences(
    found: Mapping[str, Any], expected: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """(field, found, expected) for every leaf in which two mappings differ."""
    for key in dict.fromkeys([*expected, *found]):
        a, b = found.get(key), expected.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key}", a, b


def check_fingerprint(
    name: str, before: Fingerprint | None, now: Fingerprint, source: LengthSource | None = None
) -> None:
    """Raise unless a source is the corpus that it was.
    Args:
        name: the run's name for it.
        before, now: its fingerprints.
        source: may judge and word the error itself, with a method ``changed``; None if it is not available.

    Raises:
        StateError: naming each field that differs.
    """
    if before == now:
        return
    if before is not None and hasattr(source, "changed"):
        if (error := source.changed(name, before, now)) is not None:  # type: ignore[union-attr]
            raise error
        return
    fields = ("documents", "tokens", "lengths", "contents", "tokenizer", "trained")
    differ = [f for f in fields if before is None or getattr(before, f) != getattr(now, f)]
    cause, action = _likely_change(name, before, now)
    raise StateError(
        f"source '{name}' is not the corpus that the state was made with",
        found=listing((f"{name}.{f}", getattr(now, f)) for f in differ),
        expected=listing((f"{name}.{f}", getattr(before, f, None)) for f in differ),
        cause=cause,
        action=action,
    )


def listing(items: Iterator[tuple[str, Any]]) -> str:
    """Fields and their values in one line, for an error."""
    return ", ".join(f"{field} {json.dumps(value)}" for field, value in items)


def _likely_change(name: str, before: Fingerprint | None, now: Fingerprint) -> tuple[str, str]:
    """The likely cause, and the next action."""
    action = f"give '{name}' the path of the corpus as it was, or add the new data as a separate source"
    if before is None:
        return "the source is new", action
    if now.documents > before.documents:
        return (
            f"the corpus, or the part of it that --split (or split in the data config) takes, has grown by "
            f"{now.documents - before.documents} documents",
            f"give back the split, if it was changed; if documents were appended to the corpus, declare that they take "
            f"part: append: next_epoch (or now) for '{name}' in the data config; or {action}",
        )
    if now.documents < before.documents:
        return (
            f"the corpus, or the part of it that --split (or split in the data config) takes, has lost "
            f"{before.documents - now.documents} documents",
            f"give back the split, if it was changed; or {action}",
        )
    if now.lengths != before.lengths:
        return "the corpus was prepared again, or its index is damaged", action
    if now.tokenizer == before.tokenizer and now.contents == before.contents:
        return _other_spans(name, before, now)
    if now.tokenizer == before.tokenizer:
        return _other_contents(name, before, now), action
    if now.tokenizer is None:
        return (
            "the lengths are the same, but it is no longer known which tokenizer made the corpus: "
            "PREFIX.megaresume.json was deleted, or not copied with the .bin and the .idx",
            f"put the PREFIX.megaresume.json of '{name}' back, or prepare the corpus again in the same way",
        )
    if before.tokenizer is None:
        return "the tokenizer was not known when the state was made: the corpus was prepared again since", action
    return "the corpus was made with another tokenizer or image processor", action


def _other_spans(name: str, before: Fingerprint, now: Fingerprint) -> tuple[str, str]:
    """The case that the tokens are the same, but other ones of them are trained."""
    if now.trained is None:
        return (
            "the spans that say which tokens are trained are gone: PREFIX.spans was deleted, or not copied with the "
            ".bin and the .idx",
            f"put the PREFIX.spans of '{name}' back, or prepare the corpus again in the same way",
        )
    return (
        "the tokens are the same, and others of them are trained: PREFIX.spans was replaced, or the corpus was "
        "prepared again with other options of --train",
        f"give '{name}' the spans that it had, or add the corpus as it is now as a separate source",
    )


def _other_contents(name: str, before: Fingerprint, now: Fingerprint) -> str:
    if before.contents is None or now.contents is None:
        when = "when the state was made" if before.contents is None else "any more"
        return f"the contents are not known {when}: fingerprint() of the class of '{name}' was added or changed"
    return (
        "documents of the same lengths have other contents: the corpus was prepared again from other data, a file of "
        "it was replaced, or, of a Python object, get(i) does not give the same tokens each time"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A corpus that has grown."""

    source: str
    append: Append
    #: the number of documents before.
    before: int
    after: int
    #: when the new documents come, in words.
    when: str

    def __str__(self) -> str:
        return f"source '{self.source}' grew from {self.before:,} to {self.after:,} documents; the new ones {self.when}"


def _when(entry: SourceConfig, cursor: SourceCursor) -> str:
    """When a grown source's new documents will come, from its cursor, in words."""
    has_begun = bool(cursor.eras) and cursor.left < cursor.size
    at_once = entry.append == "now" or not has_begun
    epoch = cursor.epoch + (not at_once)
    if entry.max_epochs is not None and entry.on_exhausted != "repeat" and epoch >= entry.max_epochs:
        return f"do not come: max_epochs {entry.max_epochs} ends the source before; raise it to train them"
    when = "at once" if at_once else "from its next epoch on"
    return f"come {when}" if entry.weight > 0 else f"come {when} when it is drawn again: its weight is 0"


def check_corpora(
    config: StreamConfig,
    names: Mapping[str, str],
    fingerprints: Mapping[str, Fingerprint],
    state: StreamState,
    sources: Mapping[str, LengthSource],
) -> tuple[list[Growth], list[str]]:
    """Refuse a corpus that is not the one of the state, unless it has grown, or has changed, and that is declared.

    Args:
        config: the current one.
        names: of its sources -> those that the run knows them by.
        fingerprints: by today's names.
        state: of the run.
        sources: those that are available, by today's names.

    Returns:
        Those that have grown; and in words, those whose contents have changed.

    Raises:
        StateError: naming what differs.
    """
    grown, changed = [], []
    for entry in config.sources:
        name, now = names.get(entry.name, entry.name), fingerprints.get(entry.name)
        before = state.fingerprints.get(name)
        if name not in state.sources or now is None or now == before:
            continue
        if before is None or now.documents <= before.documents or entry.append is None or entry.name not in sources:
            check_fingerprint(name, before, now, sources.get(entry.name))
            if before is not None and before.contents is not None:
                changed.append(f"source '{name}' holds something else: contents {before.contents} -> {now.contents}")
            continue
        first = first_documents(sources[entry.name], entry.name, before.documents)
        if first != before and hasattr(sources[entry.name], "changed"):
            check_fingerprint(name, before, now, sources[entry.name])
        _check_beginning(name, before, first, now.documents)
        when = _when(entry, state.sources[name])
        grown.append(Growth(source=name, append=entry.append, before=before.documents, after=now.documents, when=when))
    return grown, changed


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
