"""Figures by source: the tokens in a run's samples follow from (config, sample number).

    StreamState at a sample    tokens and documents by source since the start of the run, share, epoch, what is left
    Plan of the samples since  how many of the tokens are trained, and how many documents are cut

The thread that asks has a copy of the stream, so that its planning and the training do not wait for each other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megaresume.checkpoint.metrics.figures import Value
from megaresume.data.source import Source, is_document_source
from megaresume.stream.arrays import Int64Array
from megaresume.stream.kernel import DOCUMENT, LENGTH, OFFSET, SOURCE
from megaresume.stream.planner import Plan
from megaresume.stream.source import LengthSource, count_trained
from megaresume.stream.state import SourceCursor
from megaresume.stream.stream import Stream

#: samples planned at a time.
_CHUNK = 4096
#: counts by source: names in `FIGURES`, after ``megaresume.source.``. Every mark in run.jsonl has these counts, and the
#: next start continues them.
COUNTED = ("tokens", "trained", "documents", "cut")


def in_samples(fields: Mapping[str, Any], names: Sequence[str]) -> tuple[Int64Array, Int64Array]:
    """(tokens, documents) by source in the samples before a position: those drawn, minus those in open bins and those
    left out; int64[sources] each.

    Args:
        fields: from `Stream.fields_at`, or those of a `StreamState`: ``sources``, ``bins``, ``pending``, ``tails``.
        names: of the sources, in the order of the config.
    """
    drawn: Mapping[str, SourceCursor] = fields["sources"]
    cursors = [drawn.get(name) for name in names]
    tokens = np.array([0 if c is None else c.tokens - c.left_out_tokens for c in cursors], np.int64)
    documents = np.array([0 if c is None else c.documents - c.left_out_documents for c in cursors], np.int64)
    waiting = [*(s for b in fields["bins"] for s in b.segments), *fields["pending"], *fields["tails"]]
    for source, _, offset, length in waiting:
        tokens[source] -= length
        documents[source] -= offset == 0
    return tokens, documents


def labels_of(source: LengthSource, documents: Int64Array, offsets: Int64Array, lengths: Int64Array) -> Int64Array:
    """The number of trained labels in segments: the token after each, if it is in the same document, and trained.

    Args:
        source: of the documents.
        documents, offsets, lengths: int64[n] each, in tokens.

    Returns:
        int64[n].
    """
    labels = np.minimum(lengths, source.lengths(documents) - offsets - 1)
    return count_trained(source, documents, offsets + 1, labels)


class SourceFigures:
    """The figures by source of one run, sample after sample.

    Args:
        stream: of the training.
        sample: number of samples trained when this process began.
        before: the result of `counts` at that sample; None: unknown. Then ``trained`` and ``cut``, which are in no
            state, are left out.
    """

    def __init__(self, stream: Stream, sample: int, before: Mapping[str, Mapping[str, int]] | None = None) -> None:
        self._stream = copy.copy(stream)
        self.sample = sample
        self.names = [source.label for source in stream.config.sources]
        self._keys = [source.name for source in stream.config.sources]
        #: tokens in samples, and positions, since the last reading.
        self._filled = [0, 0]
        self._counts = dict.fromkeys(COUNTED, np.zeros(len(self.names), np.int64))
        self._counts["tokens"], self._counts["documents"] = in_samples(self._fields(sample), self._keys)
        #: sources that know which labels are trained without reading a document.
        self._labelled = [
            k
            for k, source in enumerate(self._stream.sources)
            if isinstance(source, Source) and not is_document_source(source)
        ]
        #: the counts that are known since the start of the run.
        self._known: tuple[str, ...] = COUNTED
        for name in ("trained", "cut"):
            if sample and name not in (before or {}):
                self._known = tuple(one for one in self._known if one != name)
            known = (before or {}).get(name, {})
            self._counts[name] = np.array([known.get(source, 0) for source in self.names], np.int64)

    def _fields(self, sample: int) -> Mapping[str, Any]:
        return self._stream.fields_at(sample)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """``tokens``, ``trained``, ``documents`` and ``cut`` by source, since the start of the run, as far as known."""
        return {name: dict(zip(self.names, self._counts[name].tolist(), strict=True)) for name in self._known}

    def count_to(self, sample: int) -> None:
        """Count the samples before this one.

        Raises:
            CorpusError, StreamExhausted: see `Stream.plan`.
        """
        while self.sample < sample:
            stop = min(sample, self.sample + _CHUNK)
            plan = self._stream.plan(self.sample, stop)
            self._filled[0] += int(plan.table[:, LENGTH].sum())
            self._filled[1] += self._places(self.sample, stop)
            self._count(plan)
            self.sample = stop

    def advance(self, sample: int) -> dict[str, Value]:
        """Count the samples before this one, and return the figures. Raises as `count_to`."""
        self.count_to(sample)
        tokens, places = self._filled
        self._filled = [0, 0]
        found: dict[str, Value] = {}
        if self._stream.shape_at(max(sample - 1, 0))[0] > 1:  # otherwise samples are items, whose tokens are unknown
            counts = self.counts
            labelled = [self.names[source] for source in self._labelled]
            found |= {f"megaresume.source.{name}": counts[name] for name in counts if name != "trained"}
            if "trained" in counts:
                found["megaresume.source.trained"] = {name: counts["trained"][name] for name in labelled}
            found["megaresume.tokens"] = int(self._counts["tokens"].sum())
            if places:
                found["megaresume.fill"] = tokens / places
        else:
            found["megaresume.source.documents"] = self.counts["documents"]
        return found | self._drawn(sample)

    def _places(self, first: int, stop: int) -> int:
        """The number of positions in these samples."""
        length = self._stream.shape_at(first)[0]
        if self._stream.shape_at(stop - 1)[0] == length:
            return length * (stop - first)
        return sum(self._stream.shape_at(sample)[0] for sample in range(first, stop))  # a stage begins among them

    def _count(self, plan: Plan) -> None:
        table, counts = plan.table, self._counts
        for source in np.unique(table[:, SOURCE]).tolist():
            mine = table[table[:, SOURCE] == source]
            documents, offsets, lengths = mine[:, DOCUMENT], mine[:, OFFSET], mine[:, LENGTH]
            of = self._stream.sources[source]
            begins = offsets == 0
            counts["tokens"][source] += lengths.sum()
            if source in self._labelled:
                counts["trained"][source] += labels_of(of, documents, offsets, lengths).sum()
            counts["documents"][source] += begins.sum()
            counts["cut"][source] += (begins & (lengths < of.lengths(documents))).sum()

    def _drawn(self, sample: int) -> dict[str, Value]:
        """Share against weight, and the progress of each source."""
        drawn: Mapping[str, SourceCursor] = self._fields(sample)["sources"]
        config = self._stream.config_at(sample)
        weights = {source.label: source.weight for source in config.sources}
        units = {label: drawn[key].drawn_in_stage for label, key in zip(self.names, self._keys, strict=True)}
        return {
            "megaresume.source.share": _parts(units),
            "megaresume.source.weight": _parts(weights),
            "megaresume.source.epoch": {
                label: drawn[key].epochs for label, key in zip(self.names, self._keys, strict=True)
            },
            "megaresume.source.left": {
                label: drawn[key].left for label, key in zip(self.names, self._keys, strict=True) if drawn[key].eras
            },
        }


def _parts(numbers: Mapping[str, int]) -> dict[str, float]:
    total = sum(numbers.values())
    return {name: number / total if total else 0.0 for name, number in numbers.items()}
