"""Losses by segment: sums on the training device, then by source and by document in a thread.

    token_loss [m, S] --index_add_--> sums of the segments of the micro-batch --asynchronous copy--> thread

Nothing waits for the device: what it has not finished when the thread looks is looked at again later.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megaresume.checkpoint.metrics.segments import SegmentLosses
from megaresume.checkpoint.metrics.steps import Copy
from megaresume.stream.arrays import Int64Array
from megaresume.stream.errors import UsageError
from megaresume.stream.kernel import LENGTH
from megaresume.stream.stream import Stream

log = logging.getLogger(__name__)

#: micro-batches that wait for the thread; older ones are dropped.
MAX_WAITING = 1 << 14
#: steps after which a moving average has forgotten about two thirds.
STEPS = 100


def segments_of(stream: Stream, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The segments of samples: the index of its sample for each, and its row of the plan: int64[s], int64[s, 5]."""
    tables = [stream.plan(sample, sample + 1).table for sample in samples.tolist()]
    return np.repeat(np.arange(len(tables)), [len(table) for table in tables]), np.concatenate(tables)


@dataclass(frozen=True, slots=True)
class _Waiting:
    samples: Int64Array
    segments: Int64Array
    #: float64[s + 1, 2] on the CPU: sums and tokens; the first row is for padding.
    sums: Copy


class SegmentSums:
    """What ``meter.losses`` has added up, in one process.

    Args:
        stream: of the training.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._waiting: deque[_Waiting] = deque()
        self._has_dropped = False

    def add(self, samples: Sequence[int], losses: torch.Tensor, counts: torch.Tensor | None) -> None:
        """Add a micro-batch, without synchronising with the device.

        Args:
            samples: m sample numbers in the stream.
            losses: float[m, S], any device: the loss of each token's label. Or [1, m * S], one sample after the other.
            counts: float or bool[m, S]: which of them are trained; None: those that are not 0.

        Raises:
            UsageError: any other shape.
        """
        numbers = np.asarray(samples, np.int64)
        rows, table = segments_of(self._stream, numbers)
        ids = self._places(numbers, rows, table, tuple(losses.shape))
        with torch.no_grad():
            flat = losses.detach().reshape(-1).to(torch.float64)
            counted = flat != 0 if counts is None else _to(flat.device, counts.detach().reshape(-1)) > 0
            weights, where = counted.to(flat.dtype), _to(flat.device, torch.from_numpy(ids))
            both = torch.stack([torch.where(weights > 0, flat, torch.zeros_like(flat)), weights], dim=1)
            sums = torch.zeros(len(table) + 1, 2, dtype=flat.dtype, device=flat.device).index_add_(0, where, both)
            copy = Copy(sums)
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            if not self._has_dropped:
                self._has_dropped = True
                log.warning(
                    "megaresume: metrics: losses of %d micro-batches wait to be counted, and the oldest are dropped: "
                    "losses by source and by document are incomplete; this is logged once",
                    MAX_WAITING,
                )
        self._waiting.append(_Waiting(numbers, np.bincount(rows, minlength=len(numbers)), copy))

    def _places(self, samples: Int64Array, rows: Int64Array, table: Int64Array, shape: tuple[int, ...]) -> Int64Array:
        """The segment of every token, counted from 1; 0 for padding: int64[m * S]."""
        length, align = self._stream.shape_at(int(samples[0]))
        size = int(np.prod(shape))
        if length == 1 and shape[0] == len(samples):  # items, one per row
            return np.repeat(np.arange(1, len(samples) + 1), size // len(samples))
        if size == table[:, LENGTH].sum():  # without padding
            return np.repeat(np.arange(1, len(table) + 1), table[:, LENGTH])
        if size != len(samples) * length:
            raise UsageError(
                "these losses are not those of the micro-batch",
                found=f"token_loss of shape {list(shape)}, {len(samples)} samples",
                expected=f"[{len(samples)}, {length}]: a loss for every token of its samples",
                cause="a mean was taken, or context parallelism has given this rank a part of each sample",
                action="call meter.losses with cross_entropy(..., reduction='none')",
            )
        taken = -(-table[:, LENGTH] // align) * align
        before = np.cumsum(taken) - taken
        columns = before - before[np.searchsorted(rows, rows)]
        ids = np.zeros((len(samples), length), np.int64)
        ends = columns + table[:, LENGTH]
        for k, (row, column, end) in enumerate(np.stack([rows, columns, ends], axis=1).tolist(), start=1):
            ids[row, column:end] = k
        return ids.reshape(-1)

    def take(self, *, wait: bool = False) -> list[SegmentLosses]:
        """Those whose sums have arrived from the device, in order; with ``wait``, all of them."""
        done: list[SegmentLosses] = []
        while self._waiting:
            if wait:
                self._waiting[0].sums.wait()
            elif not self._waiting[0].sums.is_here():
                break
            one = self._waiting.popleft()
            sums = one.sums.here.numpy()[1:]
            done.append(SegmentLosses(one.samples, one.segments, sums[:, 0].copy(), sums[:, 1].astype(np.int64)))
        return done


def _to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to a device without waiting for a GPU, as a copy from memory that is not page-locked would."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Averages:
    """Moving averages of the loss by source."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, by_source: Mapping[str, Sequence[float]], steps: float) -> None:
        """Add (sum, tokens) of each source, over this many steps."""
        keep = (1 - 1 / STEPS) ** max(steps, 0.0)
        for name, (total, tokens) in by_source.items():
            both = self._sums.setdefault(name, [0.0, 0.0])
            both[0], both[1] = both[0] * keep + total, both[1] * keep + tokens

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """(source, loss per token)."""
        return ((name, total / tokens) for name, (total, tokens) in self._sums.items() if tokens)
