"""The contents of a run's samples, the ranks that trained them, and their records in tar shards.

`ShardRecords`: the record and tar shard of an image-text document.

fill        from the index alone, for millions of segments: shard, number in it, images, image tokens
describe    from the record itself: its key, and every image with its size and tokens

`Trace`: the contents of any sample of a run, and where it was trained; `Dealt`: its position in its global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megaresume.data.source import is_document_source
from megaresume.runs.directory import Run
from megaresume.runs.history import UNKNOWN, Span, StepMap
from megaresume.runs.trace.replan import Past, Planned, Replan
from megaresume.stream.arrays import Int64Array
from megaresume.stream.config import StreamConfig
from megaresume.stream.dealing import dealt_order
from megaresume.stream.errors import CorpusError, StreamExhausted
from megaresume.stream.kernel import DOCUMENT, LENGTH, OFFSET, SOURCE
from megaresume.stream.planner import Plan, concatenate
from megaresume.stream.progress import Progress
from megaresume.stream.skips import trained
from megaresume.stream.source import LengthSource

if TYPE_CHECKING:
    from megaresume.data.shard_source import ShardSource


def shard_source(source: object) -> tuple[ShardSource, int] | None:
    """The shard source of a source, and the number in it of the first document; None if it has none."""
    if not is_document_source(source):  # avoids importing the reader of shards for text
        return None
    from megaresume.data.shard_source import ShardSource

    inner = getattr(source, "source", source)  # a part of a split is a view
    return (inner, int(getattr(source, "start", 0))) if isinstance(inner, ShardSource) else None


class ShardRecords:
    """The tar-shard records of a run's documents.

    Args:
        sources: those of the run, in order.
    """

    def __init__(self, sources: Sequence[object]) -> None:
        found = {i: shard_source(source) for i, source in enumerate(sources)}
        self._sources = {i: one for i, one in found.items() if one is not None}
        #: the shards of all sources, as named in their indexes.
        self.shards: list[str] = []
        self._first_shard: dict[int, int] = {}
        for i, (source, _) in self._sources.items():
            self._first_shard[i] = len(self.shards)
            self.shards += [shard.path for shard in source.index.files]

    def __contains__(self, source: int) -> bool:
        """Whether the source with this number is in tar shards."""
        return source in self._sources

    def fill(self, which: Int64Array, documents: Int64Array, out: Int64Array) -> None:
        """Write (number in ``shards``, record in the shard, images, image tokens); -1 for unknown.

        Args:
            which: int64[s], number of the source.
            documents: int64[s].
            out: int64[s, 4].
        """
        out[:] = -1
        for i, (source, start) in self._sources.items():
            rows = np.flatnonzero(which == i)
            ids = documents[rows] + start
            shard = source.index.files_of(ids)
            firsts = np.array([info.first for info in source.index.files], np.int64)
            columns = [shard + self._first_shard[i], ids - firsts[shard]]
            columns += [source.index.column(name)[ids].astype(np.int64) for name in ("num_images", "image_tokens")]
            out[rows] = np.stack(columns, axis=1)

    def place(self, source: int, document: int) -> dict[str, Any]:
        """The place of one document as plain JSON; empty if its source has no shards."""
        if source not in self._sources:
            return {}
        out = np.empty((1, 4), np.int64)
        self.fill(np.array([source]), np.array([document]), out)
        shard, record, num_images, image_tokens = out[0].tolist()
        images = None if num_images < 0 else num_images
        return {
            "shard": self.shards[shard],
            "record": record,
            "num_images": images,
            "image_tokens": image_tokens,
        }

    def describe(self, source: int, document: int) -> dict[str, Any]:
        """The key and the images (member, pixels, tokens) of a document, in order; or the ``error``.

        Raises:
            SetupError: the store of its shard does not answer.
        """
        if source not in self._sources:
            return {}
        shards, start = self._sources[source]
        try:
            record = shards.record(start + document)
        except CorpusError as error:
            return {"key": None, "images": [], "error": error.headline}
        try:
            found = shards.encoder.images(record, shards.part(start + document))
        except CorpusError as error:
            return {"key": record.key, "images": [], "error": error.headline}
        names = ("member", "width", "height", "tokens")
        return {"key": record.key, "images": [dict(zip(names, image, strict=True)) for image in found]}


def record_words(row: Mapping[str, Any]) -> str:
    """The record of a document, for people: ``(pages-0.tar #3, images: 2 of 40 tokens)``."""
    if "shard" not in row:
        return ""
    place = f"{row['shard']} #{row['record']}"
    if "key" not in row:
        count = "?" if row["num_images"] is None else row["num_images"]
        return f" ({place}, images: {count} of {row['image_tokens']} tokens)"
    words = [f"{place} '{row['key']}'" if row["key"] is not None else place, image_words(row["images"])]
    return f" ({', '.join(word for word in [*words, row.get('error', '')] if word)})"


def image_words(images: Sequence[Mapping[str, Any]]) -> str:
    """``0.png 384x256 120 tokens, 1.png ...``."""
    return ", ".join(f"{i['member']} {i['width']}x{i['height']} {i['tokens']} tokens" for i in images)


#: columns of `TracePiece.samples` and of `TracePiece.segments`.
SAMPLE_COLUMNS = ("step", "sample", "rank", "micro_batch", "tokens")
#: column of `TracePiece.samples`: the number that the sample would have if none were left out.
ABSOLUTE = 5
SEGMENT_COLUMNS = ("source", "epoch", "document", "offset", "length", "place", "end")
#: further columns of `TracePiece.segments` if the run has tar shards: shard, number of the record in it, images and
#: their tokens; `UNKNOWN` for documents of other sources.
RECORD_COLUMNS = ("shard", "record", "num_images", "image_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class TracePiece:
    """Consecutive samples with one stage, batch size and layout: n samples, s segments."""

    #: names of the sources.
    names: list[str]
    stage: str
    config: StreamConfig
    span: Span
    #: whether they were trained when the newest state was saved.
    past: bool
    #: int64[n, 6]: `SAMPLE_COLUMNS` and `ABSOLUTE`; `UNKNOWN` if no record tells.
    samples: Int64Array
    #: uint64[n]: identities of the samples.
    hashes: npt.NDArray[np.uint64]
    #: int64[s, 7]: `SEGMENT_COLUMNS`: place is the position in the sample, end the offset after the segment; in tokens.
    #: int64[s, 11] if there are ``shards``: also `RECORD_COLUMNS`.
    segments: Int64Array
    #: int64[n + 1]: the segments of sample k are ``starts[k] .. starts[k + 1]``.
    starts: Int64Array
    #: whether these samples were left out of training, so that they only have absolute numbers.
    left_out: bool = False
    #: whether the run leaves anything out, so that absolute numbers differ.
    numbered: bool = False
    #: names of all tar shards of the run.
    shards: Sequence[str] = ()

    def column(self, name: str) -> Int64Array:
        """A column of ``samples`` (int64[n]) or of ``segments`` (int64[s]), by name."""
        if name in SAMPLE_COLUMNS:
            return self.samples[:, SAMPLE_COLUMNS.index(name)]
        return self.segments[:, (*SEGMENT_COLUMNS, *RECORD_COLUMNS).index(name)]

    def rows(self) -> Iterator[dict[str, Any]]:
        """The samples as plain JSON."""
        table = self.segments.tolist()
        starts = self.starts.tolist()
        for k, (values, identity) in enumerate(zip(self.samples.tolist(), self.hashes.tolist(), strict=True)):
            row = {n: None if v == UNKNOWN else v for n, v in zip(SAMPLE_COLUMNS, values, strict=False)}
            if self.numbered:
                row["absolute"] = values[ABSOLUTE]
            row["hash"] = f"{identity:016x}"
            row["segments"] = [self._segment(segment) for segment in table[starts[k] : starts[k + 1]]]
            yield row

    def _segment(self, numbers: list[int]) -> dict[str, Any]:
        last = len(SEGMENT_COLUMNS) - 1
        segment = {"source": self.names[numbers[0]], **dict(zip(SEGMENT_COLUMNS[1:last], numbers[1:last], strict=True))}
        if self.shards and numbers[last + 1] != UNKNOWN:
            record = {n: None if v == UNKNOWN else v for n, v in zip(RECORD_COLUMNS, numbers[last + 1 :], strict=True)}
            segment |= record | {"shard": self.shards[numbers[last + 1]]}
        return segment


class Dealt:
    """The position of each sample in its global batch, also with balanced ranks.

    Balancing uses the lengths of all samples in the global batch, which are planned again.

    Args:
        replan: plans them.
    """

    def __init__(self, replan: Replan) -> None:
        self._past = Past(replan)
        #: the last global batch: its first sample, and the positions of its samples.
        self._last: tuple[int, Int64Array] | None = None

    def places(self, span: Span, first: int, stop: int) -> Int64Array:
        """The positions of samples in their global batches, from 0: int64[n]; `UNKNOWN` if no record tells.

        Args:
            span: has these samples.
            first, stop: the samples.

        Raises:
            StateError: ranks were balanced by another version of megaresume.
        """
        if span.batch_size is None or span.ranks is None:
            return np.full(stop - first, UNKNOWN, np.int64)
        size = span.batch_size
        inside = (np.arange(first, stop) - span.step_sample) % size
        if span.topology is None or span.topology.balance is None:
            return inside
        begin = first - int(inside[0]) if stop > first else stop
        parts = [self._of_step(span, sample, size) for sample in range(begin, stop, size)]
        places = np.concatenate(parts) if parts else inside
        return places[first - begin : stop - begin]

    def _of_step(self, span: Span, sample: int, size: int) -> Int64Array:
        if self._last is None or self._last[0] != sample or len(self._last[1]) != size:
            self._last = sample, self._dealt(span, sample, size)
        return self._last[1]

    def _dealt(self, span: Span, sample: int, size: int) -> Int64Array:
        assert span.topology is not None and span.ranks is not None
        places = np.full(size, UNKNOWN, np.int64)
        try:
            plan = concatenate([block.plan for block in self._past.blocks(sample, sample + size)])
        except StreamExhausted:  # nobody trains a step that the stream does not have
            return places
        dp, micro = span.ranks
        order = dealt_order(plan, span.topology.balance, micro_batch_size=micro, dp_size=dp)
        places[order - sample] = np.arange(size)
        return places


class Trace:
    """The stream of a run, planned again as far as needed.

    Args:
        run: the run.
        sources: its corpora, by name; a missing one raises when a sample needs it.
        compare: check the plan against every recorded point.

    Raises:
        StateError: a corpus has changed.
    """

    def __init__(self, run: Run, sources: Mapping[str, LengthSource], *, compare: bool = True) -> None:
        self.run, self.history = run, run.history
        self.steps = StepMap(self.history)
        self.replan = Replan(self.history, sources, self.steps.schedule, compare=compare)
        self.records = ShardRecords(self.replan.sources)
        self._dealt = Dealt(self.replan)

    @property
    def names(self) -> list[str]:
        """The names of the sources."""
        return self.replan.names

    @property
    def is_of_items(self) -> bool:
        """See `StreamConfig.is_of_items`."""
        return self.history.state.config_now.is_of_items

    def place(self, sample: int) -> tuple[int | None, int | None, int | None]:
        """(step, rank, micro-batch) of a sample; None if no record tells.

        Raises:
            StateError: ranks were balanced by another version of megaresume.
        """
        span = self.steps.span(sample)
        rank, micro = _ranks(span, self._dealt.places(span, sample, sample + 1))[0].tolist()
        known = [None if value == UNKNOWN else value for value in (rank, micro)]
        return self.steps.step_of(sample), known[0], known[1]

    def work(self, first: int, stop: int) -> int:
        """How many samples must be planned for a range, including those before it."""
        state = self.history.before(first)
        return stop - (0 if state is None else state.samples)

    def pieces(self, first: int, stop: int, *, progress: Progress = lambda samples: None) -> Iterator[TracePiece]:
        """Samples ``first .. stop``, in order, some thousands at a time.

        Raises:
            StreamExhausted, CheckpointError, CorpusError: see `Replan.plans`.
        """
        for planned in self.replan.plans(first, stop, progress=progress, left_out=True):
            plan = planned.plan
            if planned.left_out:
                nowhere = Span(first=0, stop=0, step_sample=0, step=UNKNOWN, batch_size=None, topology=None)
                yield self._piece(plan, planned, nowhere)
                continue
            for span in self.steps.spans(plan.first, plan.stop):
                yield self._piece(plan.slice(span.first, span.stop), planned, span)

    def _piece(self, plan: Plan, planned: Planned, span: Span) -> TracePiece:
        skipped = self.replan.skips.ranges
        samples = _samples(plan, span, self._dealt.places(span, plan.first, plan.stop))
        numbers = samples[:, SAMPLE_COLUMNS.index("sample")]
        if planned.left_out:
            numbers[:] = UNKNOWN
        elif skipped:
            edges = np.array([trained(skipped, a) for a, _ in skipped])
            before = np.cumsum([0, *(b - a for a, b in skipped)])
            samples[:, ABSOLUTE] = numbers + before[edges.searchsorted(numbers, side="right")]
        table, starts = plan.table, plan.starts
        num_columns = len(SEGMENT_COLUMNS) + (len(RECORD_COLUMNS) if self.records.shards else 0)
        segments = np.empty((len(table), num_columns), np.int64)
        columns = {
            "source": table[:, SOURCE],
            "epoch": plan.epochs(),
            "document": table[:, DOCUMENT],
            "offset": table[:, OFFSET],
            "length": table[:, LENGTH],
            "place": places(table[:, LENGTH], starts, planned.config.packing.align),
            "end": table[:, OFFSET] + table[:, LENGTH],
        }
        for k, name in enumerate(SEGMENT_COLUMNS):
            segments[:, k] = columns[name]
        if self.records.shards:
            self.records.fill(table[:, SOURCE], table[:, DOCUMENT], segments[:, len(SEGMENT_COLUMNS) :])
        return TracePiece(
            names=self.names,
            stage=planned.stage,
            config=planned.config,
            span=span,
            past=plan.first < (self.history.state.reached if planned.left_out else self.history.state.samples),
            samples=samples,
            hashes=plan.hashes,
            segments=segments,
            starts=starts,
            left_out=planned.left_out,
            numbered=bool(skipped),
            shards=self.records.shards,
        )


def places(lengths: Int64Array, starts: Int64Array, align: int) -> Int64Array:
    """The first token of each segment in its sample.

    Args:
        lengths: int64[s], of the segments.
        starts: int64[n + 1], the segments of each sample.
        align: positions are multiples of this many tokens.
    """
    taken = -(-lengths // align) * align
    before = np.cumsum(taken) - taken
    return np.asarray(before - np.repeat(before[starts[:-1]], np.diff(starts)), np.int64)


def _samples(plan: Plan, span: Span, places: Int64Array) -> Int64Array:
    """See `TracePiece.samples`, if nothing is left out."""
    sample = np.arange(plan.first, plan.stop)
    step = np.full(len(plan), UNKNOWN)
    if span.batch_size is not None:
        num = (sample - span.step_sample) // span.batch_size
        # The steps may have been counted from a later start than the samples.
        step = np.where(span.step + num > 0, span.step + num, UNKNOWN)
    rank, micro_batch = _ranks(span, places).T
    return np.stack([step, sample, rank, micro_batch, plan.tokens(), sample], axis=1)


def _ranks(span: Span, places: Int64Array) -> Int64Array:
    """(rank, micro-batch) for positions in a global batch, int64[n, 2]; `UNKNOWN` if no record tells."""
    if span.ranks is None:
        return np.full((len(places), 2), UNKNOWN, np.int64)
    dp, micro = span.ranks
    known = np.stack([places // micro % dp, places // (dp * micro)], axis=1)
    return np.where(places[:, None] == UNKNOWN, UNKNOWN, known)
