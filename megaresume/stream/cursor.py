"""Between the planner's arrays and the fields of a `StreamState`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.stream.config import StreamConfig
from megaresume.stream.documents.order import Orders, SourceOrder
from megaresume.stream.documents.pieces import PieceLists
from megaresume.stream.errors import StateError
from megaresume.stream.planning import kernel
from megaresume.stream.planning.arrays import (
    fresh_arrays,
    kernel_config,
    pending_segments,
    put_tails,
    segments_of,
    tail_segments,
    with_bins,
)
from megaresume.stream.planning.kernel import Arrays
from megaresume.stream.planning.planner import orders_of, past_orders
from megaresume.stream.planning.stages import Course
from megaresume.stream.source import AbsentSource, LengthSource
from megaresume.stream.state import Bin, Segment, SourceCursor, StreamState


def fields_of(arrays: Arrays, course: Course) -> dict[str, Any]:
    """The fields of a `StreamState` that say where the stream is, from a planner's snapshot."""
    scalars, sources = arrays.scalars.tolist(), arrays.sources.tolist()
    rows, counts = segments_of(arrays)
    in_bins = iter(_segments(rows))
    stage = scalars[kernel.STAGE]
    config = course.config(stage)
    return {
        "samples": kernel.trained_samples(arrays),
        "documents": scalars[kernel.DOCUMENTS],
        "tokens": scalars[kernel.TOKENS],
        "sources": {
            s.name: _source_cursor(row, order)
            for s, row, order in zip(config.sources, sources, course.orders[stage], strict=True)
        },
        "bins": tuple(
            Bin(opened_at=opened, segments=tuple(islice(in_bins, count)))
            for opened, count in zip(arrays.opened.tolist(), counts.tolist(), strict=False)
        ),
        "pending": tuple(_segments(pending_segments(arrays))),
        "tails": tuple(_segments(tail_segments(arrays))),
        "stages": course.records(stage),
        "digest": f"{int(arrays.digest[0]):016x}",
    }


def comparable(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `fields_of`, or those fields of a state: to compare the two."""
    names = ("samples", "documents", "tokens", "sources", "bins", "pending", "tails", "stages", "digest")
    return {name: fields[name] for name in names}


def _segments(rows: npt.NDArray[np.int64]) -> list[Segment]:
    return list(map(_segment, rows[:, _OF_STATE].tolist()))


#: Columns of a segment that a state has: the document follows from the position.
_OF_STATE = [kernel.SOURCE, kernel.POSITION, kernel.OFFSET, kernel.LENGTH]
#: As `Segment._make`, at a third of its time: a state has some hundred, and is taken after every step.
_segment: Callable[[list[int]], Segment] = partial(tuple.__new__, Segment)


def _source_cursor(row: Sequence[int], order: SourceOrder) -> SourceCursor:
    position = row[kernel.NEXT]
    return SourceCursor(
        position=position,
        epoch=order.epoch_of(position),
        documents=row[kernel.DRAWN_DOCUMENTS],
        tokens=row[kernel.DRAWN_TOKENS],
        skipped=position - row[kernel.DRAWN_PIECES],
        drawn_in_stage=row[kernel.DRAWN_IN_STAGE],
        exhausted=bool(row[kernel.IS_EXHAUSTED]),
        left_out_documents=row[kernel.LEFT_OUT_DOCUMENTS],
        left_out_tokens=row[kernel.LEFT_OUT_TOKENS],
        eras=order.eras,
    )


def arrays_of(
    state: StreamState, course: Course, sources: Sequence[LengthSource], lists: Sequence[PieceLists] | None = None
) -> Arrays:
    """The planner's arrays at a state: the inverse of `fields_of`.

    Args:
        state: where to continue.
        course: the stages up to it and from it on; is told the orders of the sources.
        sources: of the course.
        lists: of their long documents, if they are known already.

    Raises:
        StateError: the state's numbers contradict each other, the config or the sources.
    """
    stage = len(state.stages) - 1
    config = course.config(stage)
    constants = kernel_config(config)
    arrays = fresh_arrays(config)
    _check_stages(state)
    _restore_sources(arrays, state, config)
    _check_sums(state)
    known = orders_of(state, config, sources, lists) if course.past is None else past_orders(course, config, sources)
    orders = course.orders[stage] = known.known_in(stage)
    _check_sources(state, config, orders)
    scalars = arrays.scalars
    scalars[kernel.SAMPLES] = state.reached
    scalars[kernel.LEFT_OUT] = state.reached - state.samples
    scalars[kernel.DOCUMENTS] = state.documents
    scalars[kernel.TOKENS] = state.tokens
    scalars[kernel.STAGE_UNITS] = arrays.sources[:, kernel.DRAWN_IN_STAGE].sum()
    arrays.digest[0] = int(state.digest, 16)
    scalars[kernel.STAGE] = stage
    if state.pending:
        rows = _rows_of(state.pending, orders)
        scalars[kernel.PENDING : kernel.PENDING + kernel.SEGMENT_WIDTH] = rows[0]
        arrays = arrays._replace(carried=rows[1:])
    most = len(arrays.tails) + min(len(arrays.fillers), kernel.FILLERS + 1)
    if len(state.tails) > most:
        raise _contradiction(f"{len(state.tails)} ends of documents kept back", f"at most {most}")
    put_tails(arrays, _rows_of(state.tails, orders), orders)
    most_open = 0 if config.packing.traits.is_one_document else constants.open_bins
    opened = [b.opened_at for b in state.bins]
    if len(state.bins) > most_open or opened != sorted(opened):
        raise _contradiction(f"bins opened at samples {opened}", f"at most {most_open}, the oldest first")
    room = [_room(b, constants, state.reached) for b in state.bins]
    in_bins = _rows_of([s for b in state.bins for s in b.segments], orders)
    return with_bins(arrays, room, opened, in_bins, np.array([len(b.segments) for b in state.bins], np.int64))


def _room(open_bin: Bin, constants: kernel.Config, reached: int) -> int:
    """Tokens that an open bin has left."""
    used = sum(-(-s.length // constants.align) * constants.align for s in open_bin.segments)
    if not open_bin.segments or used >= constants.seq_length or open_bin.opened_at > reached:
        raise _contradiction(
            f"an open bin with {used} tokens, opened at sample {open_bin.opened_at}",
            f"1 to {constants.seq_length - 1} tokens, opened at sample {reached} or before",
        )
    return constants.seq_length - used


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
    sources[:, kernel.NEXT] = [c.position for c in cursors]
    sources[:, kernel.DRAWN_PIECES] = [c.position - c.skipped for c in cursors]
    sources[:, kernel.DRAWN_DOCUMENTS] = [c.documents for c in cursors]
    sources[:, kernel.DRAWN_TOKENS] = [c.tokens for c in cursors]
    sources[:, kernel.DRAWN_IN_STAGE] = [c.drawn_in_stage for c in cursors]
    sources[:, kernel.IS_EXHAUSTED] = [c.exhausted for c in cursors]
    sources[:, kernel.LEFT_OUT_DOCUMENTS] = [c.left_out_documents for c in cursors]
    sources[:, kernel.LEFT_OUT_TOKENS] = [c.left_out_tokens for c in cursors]
    sources[:, kernel.ACTIVE] &= ~sources[:, kernel.IS_EXHAUSTED] & 1
    if any(c.exhausted and s.on_exhausted == "stop" for c, s in zip(cursors, config.sources, strict=True)):
        sources[:, kernel.ACTIVE] = 0
    active = sources[:, kernel.ACTIVE] > 0
    total_weight = int(sources[active, kernel.WEIGHT].sum())
    for i in np.flatnonzero(active).tolist():
        # Python's integers: the product may leave 64 bits.
        release = divmod(int(sources[i, kernel.DRAWN_IN_STAGE]) * total_weight, int(sources[i, kernel.WEIGHT]))
        sources[i, kernel.RELEASE], sources[i, kernel.RELEASE_REST] = min(release, (kernel.LATE, 0))


def _rows_of(segments: Sequence[Segment], orders: Orders) -> npt.NDArray[np.int64]:
    """As the planner has them: int64[n, SEGMENT_WIDTH]."""
    rows = np.array([[s.source, s.position, 0, s.offset, s.length] for s in segments], np.int64)
    rows = rows.reshape(-1, kernel.SEGMENT_WIDTH)
    for i in np.unique(rows[:, kernel.SOURCE]).tolist():
        if i >= len(orders) or not orders[i].eras or not rows[:, kernel.LENGTH].all():
            raise _contradiction(
                f"a segment of {rows[:, kernel.LENGTH].min()} tokens of source {i}",
                f"at least 1 token of a source below {len(orders)} that was drawn",
            )
        mine = rows[:, kernel.SOURCE] == i
        rows[mine, kernel.DOCUMENT] = orders[i].documents_at(rows[mine, kernel.POSITION])
    return rows


def _check_sums(state: StreamState) -> None:
    """Every token and document drawn is trained, left out, in an open bin, or being placed."""
    cursors, waiting = state.sources.values(), state.waiting
    tokens, documents = sum(s.length for s in waiting), sum(s.offset == 0 for s in waiting)
    for what, num_drawn, num_trained, num_waiting in (
        ("tokens", sum(c.tokens - c.left_out_tokens for c in cursors), state.tokens, tokens),
        ("documents", sum(c.documents - c.left_out_documents for c in cursors), state.documents, documents),
    ):
        if num_drawn != num_trained + num_waiting:
            raise _contradiction(
                f"{num_drawn} {what} drawn from the sources and not left out",
                f"{num_trained} {what} trained + {num_waiting} waiting = {num_trained + num_waiting}",
            )


def _check_sources(state: StreamState, config: StreamConfig, orders: Orders) -> None:
    """Each source's numbers agree with each other, with its size and with the segments that wait."""
    waiting = state.waiting
    for i, (source, order) in enumerate(zip(config.sources, orders, strict=True)):
        if source.name not in state.sources:
            continue  # new, and not drawn yet
        c = state.sources[source.name]
        ends = source.max_epochs is not None and source.on_exhausted != "repeat"
        last = max((s.position for s in waiting if s.source == i), default=-1)
        documents = order.eras[-1].documents if order.eras else 0
        in_stage = c.documents if config.blend.unit == "documents" else c.tokens
        if (
            c.epoch != order.epoch_of(c.position)
            or (c.position > 0 and not order.eras)
            or not 0 <= c.position - c.documents - c.skipped <= (c.epoch + 1) * _most_later(order)
            or c.drawn_in_stage > in_stage
            or c.position <= last
            or (c.exhausted and not ends)
            # A later stage may allow fewer epochs than an earlier one went through.
            or (ends and len(state.stages) == 1 and order.eras and c.position > order.start_of(source.max_epochs or 0))
        ):
            raise _contradiction(
                f"source '{source.name}' of {documents} documents at {c}, its last waiting segment at position {last}",
                "the epoch of the position, position = documents + later pieces drawn + skipped and past what waits, "
                "no more drawn in the stage than in all, exhausted only at the end of its epochs",
            )


def _most_later(order: SourceOrder) -> int:
    """Pieces of an epoch that are not the first of their documents, at most."""
    if isinstance(order.lists.source, AbsentSource):
        return 1 << 62  # of what is gone nobody knows
    # An era that began in the middle of an epoch holds only what was left of it.
    whole = (order.lists.num_pieces(e.documents, e.piece) if e.rest else e.pieces for e in order.eras)
    return max((pieces - e.documents for pieces, e in zip(whole, order.eras, strict=True)), default=0)


def _contradiction(found: str, expected: str) -> StateError:
    return StateError(
        "the data state contradicts itself",
        found=found,
        expected=expected,
        cause="it was edited, or written by a faulty program",
        action="load an older checkpoint: megaresume inspect DIR lists those that are whole",
    )
