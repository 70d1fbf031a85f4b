"""Between the planner's arrays and the fields of a `StreamState`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megaresume.stream import kernel
from megaresume.stream.block_shuffle import document_at
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import StateError
from megaresume.stream.kernel import Arrays
from megaresume.stream.planner import fresh_arrays
from megaresume.stream.stages import Course, pending_segments
from megaresume.stream.state import Bin, Segment, SourceCursor, StreamState

__all__ = ["arrays_of", "comparable", "fields_of"]


def fields_of(arrays: Arrays, course: Course) -> dict[str, Any]:
    """The fields of a `StreamState` that say where the stream is, from a planner's snapshot."""
    scalars, sources = arrays.scalars.tolist(), arrays.sources.T.tolist()
    opened, slots = arrays.opened.tolist(), arrays.slot.tolist()
    stage = scalars[kernel.STAGE]
    config = course.config(stage)
    return {
        "samples": kernel.trained_samples(arrays),
        "documents": scalars[kernel.DOCUMENTS],
        "tokens": scalars[kernel.TOKENS],
        "sources": {s.name: _source_cursor(column) for s, column in zip(config.sources, sources, strict=True)},
        "bins": tuple(
            Bin(opened_at=opened[b], segments=tuple([_segment(row) for row in _rows(arrays, slots[b])]))
            for b in range(scalars[kernel.NUM_OPEN])
        ),
        "pending": tuple([_segment(row) for row in pending_segments(arrays).tolist()]),
        "stages": course.records(stage),
        "digest": f"{int(arrays.digest[0]):016x}",
    }


def comparable(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `fields_of`, or those fields of a state: to compare the two."""
    names = ("samples", "documents", "tokens", "sources", "bins", "pending", "stages", "digest")
    return {name: fields[name] for name in names}


def _rows(arrays: Arrays, slot: int) -> list[list[int]]:
    rows: list[list[int]] = arrays.bins[slot, : arrays.filled[slot]].tolist()
    return rows


def _segment(row: Sequence[int]) -> Segment:
    source, position, _, offset, length = row
    return Segment(source=source, position=position, offset=offset, length=length)


def _source_cursor(column: Sequence[int]) -> SourceCursor:
    position, documents = column[kernel.NEXT], column[kernel.DRAWN_DOCUMENTS]
    return SourceCursor(
        position=position,
        epoch=position // max(column[kernel.NUM_DOCUMENTS], 1),
        documents=documents,
        tokens=column[kernel.DRAWN_TOKENS],
        skipped=position - documents,
        drawn_in_stage=column[kernel.DRAWN_IN_STAGE],
        exhausted=bool(column[kernel.EXHAUSTED_ROW]),
        left_out_documents=column[kernel.LEFT_OUT_DOCUMENTS],
        left_out_tokens=column[kernel.LEFT_OUT_TOKENS],
    )


def arrays_of(state: StreamState, course: Course, num_documents: Sequence[int]) -> Arrays:
    """The planner's arrays at a state: the inverse of `fields_of`.

    Raises:
        StateError: the state's numbers contradict each other or the config.
    """
    stage = len(state.stages) - 1
    config, constants = course.config(stage), course.constants(stage)
    arrays = fresh_arrays(config, num_documents)
    _check_stages(state)
    _restore_sources(arrays, state, config)
    _check_sums(state)
    _check_sources(state, config, num_documents)
    scalars = arrays.scalars
    scalars[kernel.SAMPLES] = state.reached
    scalars[kernel.LEFT_OUT] = state.reached - state.samples
    scalars[kernel.DOCUMENTS] = state.documents
    scalars[kernel.TOKENS] = state.tokens
    scalars[kernel.STAGE_UNITS] = arrays.sources[kernel.DRAWN_IN_STAGE].sum()
    scalars[kernel.NUM_OPEN] = len(state.bins)
    arrays.digest[0] = int(state.digest, 16)
    scalars[kernel.STAGE] = stage
    if state.pending:
        rows = np.array([_row(segment, config, num_documents) for segment in state.pending], np.int64)
        scalars[kernel.PENDING : kernel.PENDING + kernel.SEGMENT_WIDTH] = rows[0]
        arrays = arrays._replace(carried=rows[1:])
    most_open = 0 if config.packing.mode == "none" else constants.open_bins
    opened = [b.opened_at for b in state.bins]
    if len(state.bins) > most_open or opened != sorted(opened):
        raise _contradiction(f"bins opened at samples {opened}", f"at most {most_open}, the oldest first")
    most = max((len(b.segments) for b in state.bins), default=0)
    if most > arrays.bins.shape[1]:
        shape = (arrays.bins.shape[0], most, kernel.SEGMENT_WIDTH)
        arrays = arrays._replace(bins=np.zeros(shape, np.int64))
    for b, open_bin in enumerate(state.bins):
        used = sum(-(-s.length // constants.align) * constants.align for s in open_bin.segments)
        if not open_bin.segments or used >= constants.seq_length or open_bin.opened_at > state.reached:
            raise _contradiction(
                f"an open bin with {used} tokens, opened at sample {open_bin.opened_at}",
                f"1 to {constants.seq_length - 1} tokens, opened at sample {state.reached} or before",
            )
        arrays.room[b] = constants.seq_length - used
        arrays.opened[b] = open_bin.opened_at
        arrays.filled[b] = len(open_bin.segments)
        arrays.bins[b, : len(open_bin.segments)] = [_row(s, config, num_documents) for s in open_bin.segments]
    return arrays


def _check_stages(state: StreamState) -> None:
    firsts = [record.first for record in state.stages]
    if not firsts or firsts[0] != 0 or firsts != sorted(firsts) or firsts[-1] > state.samples:
        raise _contradiction(
            f"stages that begin at samples {firsts}, at sample {state.samples}",
            "stages in order, the first at sample 0, the last at this sample or before",
        )


def _restore_sources(arrays: Arrays, state: StreamState, config: StreamConfig) -> None:
    if list(state.sources) != list(state.config["sources"]):
        raise _contradiction(f"sources {', '.join(state.sources)}", f"sources {', '.join(state.config['sources'])}")
    new = SourceCursor(position=0, epoch=0, documents=0, tokens=0, skipped=0, drawn_in_stage=0, exhausted=False)
    cursors = [state.sources.get(source.name, new) for source in config.sources]
    sources = arrays.sources
    sources[kernel.NEXT] = [c.position for c in cursors]
    sources[kernel.DRAWN_DOCUMENTS] = [c.documents for c in cursors]
    sources[kernel.DRAWN_TOKENS] = [c.tokens for c in cursors]
    sources[kernel.DRAWN_IN_STAGE] = [c.drawn_in_stage for c in cursors]
    sources[kernel.EXHAUSTED_ROW] = [c.exhausted for c in cursors]
    sources[kernel.LEFT_OUT_DOCUMENTS] = [c.left_out_documents for c in cursors]
    sources[kernel.LEFT_OUT_TOKENS] = [c.left_out_tokens for c in cursors]
    sources[kernel.ACTIVE] &= ~sources[kernel.EXHAUSTED_ROW] & 1
    if any(c.exhausted and s.on_exhausted == "stop" for c, s in zip(cursors, config.sources, strict=True)):
        sources[kernel.ACTIVE] = 0
    active = sources[kernel.ACTIVE] > 0
    total_weight = int(sources[kernel.WEIGHT, active].sum())
    for i in np.flatnonzero(active).tolist():
        # Python's integers: the product may leave 64 bits.
        release = divmod(int(sources[kernel.DRAWN_IN_STAGE, i]) * total_weight, int(sources[kernel.WEIGHT, i]))
        sources[kernel.RELEASE, i], sources[kernel.RELEASE_REST, i] = release


def _row(segment: Segment, config: StreamConfig, num_documents: Sequence[int]) -> list[int]:
    if segment.source >= len(config.sources) or segment.length == 0:
        raise _contradiction(
            f"a segment of {segment.length} tokens of source {segment.source}",
            f"at least 1 token of a source below {len(config.sources)}",
        )
    source = config.sources[segment.source]
    _, document = document_at(segment.position, num_documents[segment.source], config.seed, source.name, source.shuffle)
    return [segment.source, segment.position, document, segment.offset, segment.length]


def _check_sums(state: StreamState) -> None:
    """Every token and document drawn is trained, left out, in an open bin, or being placed."""
    waiting = _waiting(state)
    drawn = {
        "tokens": (
            sum(c.tokens - c.left_out_tokens for c in state.sources.values()),
            state.tokens,
            sum(s.length for s in waiting),
        ),
        "documents": (
            sum(c.documents - c.left_out_documents for c in state.sources.values()),
            state.documents,
            sum(s.offset == 0 for s in waiting),
        ),
    }
    for what, (num_drawn, num_trained, num_waiting) in drawn.items():
        if num_drawn != num_trained + num_waiting:
            raise _contradiction(
                f"{num_drawn} {what} drawn from the sources and not left out",
                f"{num_trained} {what} trained + {num_waiting} waiting = {num_trained + num_waiting}",
            )


def _waiting(state: StreamState) -> list[Segment]:
    return [s for b in state.bins for s in b.segments] + list(state.pending)


def _check_sources(state: StreamState, config: StreamConfig, num_documents: Sequence[int]) -> None:
    """Each source's numbers agree with each other, with its size and with the segments that wait."""
    waiting = _waiting(state)
    for i, (source, num) in enumerate(zip(config.sources, num_documents, strict=True)):
        if source.name not in state.sources:
            continue  # new, and not drawn yet
        c = state.sources[source.name]
        ends = source.max_epochs is not None and source.on_exhausted != "repeat"
        last = max((s.position for s in waiting if s.source == i), default=-1)
        in_stage = c.tokens if config.blend.unit == "tokens" else c.documents
        if (
            c.epoch != c.position // max(num, 1)
            or c.position != c.documents + c.skipped
            or c.drawn_in_stage > in_stage
            or c.position <= last
            or (c.exhausted and not ends)
            # A later stage may allow fewer epochs than an earlier one went through.
            or (ends and len(state.stages) == 1 and c.position > (source.max_epochs or 0) * num)
        ):
            raise _contradiction(
                f"source '{source.name}' of {num} documents at {c}, its last waiting segment at position {last}",
                "epoch = position // documents, position = documents drawn + skipped and past what waits, "
                "no more drawn in the stage than in all, exhausted only at the end of its epochs",
            )


def _contradiction(found: str, expected: str) -> StateError:
    return StateError(
        "the data state contradicts itself",
        found=found,
        expected=expected,
        cause="it was edited, or written by a faulty program",
        action="load an older checkpoint: megaresume inspect DIR lists those that are whole",
    )
