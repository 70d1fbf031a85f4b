"""`SegmentLosses`: the losses of segments as each process records them; and `Documents`: added up by document.

The documents follow from the numbers of the samples, so that a segment takes only about 16 bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.checkpoint.metrics.record import read_lines
from megaresume.stream.arrays import Int64Array
from megaresume.stream.kernel import DOCUMENT, SOURCE


@dataclass(frozen=True, slots=True)
class SegmentLosses:
    """The losses of the segments of some samples."""

    #: int64[n], ascending within a micro-batch: sample numbers in the stream.
    samples: npt.NDArray[np.int64]
    #: int64[n]: number of segments of each.
    segments: npt.NDArray[np.int64]
    #: float64[s]: sum of the losses of each segment's trained tokens.
    sums: npt.NDArray[np.float64]
    #: int64[s]: number of trained tokens.
    tokens: npt.NDArray[np.int64]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; arrays as base64 of little-endian numbers."""
        return {
            "samples": self.samples.tolist(),
            "segments": self.segments.tolist(),
            "sums": base64.b64encode(self.sums.astype("<f8").tobytes()).decode(),
            "tokens": base64.b64encode(self.tokens.astype("<i4").tobytes()).decode(),
        }

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> SegmentLosses:
        """Read losses. Raises KeyError, TypeError or ValueError if the line has none."""
        found = cls(
            np.array(line["samples"], np.int64),
            np.array(line["segments"], np.int64),
            np.frombuffer(base64.b64decode(line["sums"]), "<f8").astype(np.float64),
            np.frombuffer(base64.b64decode(line["tokens"]), "<i4").astype(np.int64),
        )
        num = int(found.segments.sum())
        if (len(found.samples), num, num) != (len(found.segments), len(found.sums), len(found.tokens)):
            raise ValueError("lengths that do not fit")
        return found


def read_losses(directory: Path) -> Iterator[tuple[float, SegmentLosses]]:
    """The records of all processes, file by file: (time, losses)."""
    for path in sorted(directory.glob("rank_*.jsonl")):
        for line in read_lines(path):
            try:
                for part in line.get("losses", ()):
                    yield float(line["time"]), SegmentLosses.from_dict(part)
            except (KeyError, TypeError, ValueError):
                continue


def read_sums(directory: Path, first: int, stop: int) -> dict[int, npt.NDArray[np.float64]]:
    """For each of the samples ``first .. stop`` with a record, the last one: float64[segments, 2], sums and tokens of
    its segments.
    """
    times: dict[int, float] = {}
    found: dict[int, npt.NDArray[np.float64]] = {}
    for time, losses in read_losses(directory):
        begin = 0
        for sample, segments in zip(losses.samples.tolist(), losses.segments.tolist(), strict=True):
            end = begin + segments
            # In a forward of other tokens than its own, no token is trained.
            is_known = sample in found and not losses.tokens[begin:end].any()
            if first <= sample < stop and time >= times.get(sample, 0.0) and not is_known:
                times[sample] = time
                found[sample] = np.stack([losses.sums[begin:end], losses.tokens[begin:end]], axis=1)
            begin = end
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentLoss:
    """The loss of a document over the requested samples."""

    source: str
    document: int
    #: mean over the trained tokens.
    loss: float
    tokens: int


class Documents:
    """Losses of documents and of sources, added up.

    Args:
        names: of the sources.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._sums: dict[tuple[int, int], list[float]] = {}

    def add(self, table: Int64Array, losses: SegmentLosses) -> None:
        """Add segments.

        Args:
            table: from the `Plan` of their samples, int64[s, 5].
            losses: of these segments.
        """
        rows = zip(table[:, [SOURCE, DOCUMENT]].tolist(), losses.sums.tolist(), losses.tokens.tolist(), strict=True)
        for (source, document), total, tokens in rows:
            both = self._sums.setdefault((source, document), [0.0, 0])
            both[0] += total
            both[1] += tokens

    def by_source(self) -> dict[str, tuple[float, int]]:
        """(sum, tokens) of each source with trained tokens."""
        found: dict[str, tuple[float, int]] = {}
        for (source, _), (total, tokens) in self._sums.items():
            before = found.get(self.names[source], (0.0, 0))
            found[self.names[source]] = before[0] + total, before[1] + int(tokens)
        return found

    def worst(self, most: int | None = None) -> list[DocumentLoss]:
        """The documents with the highest loss per token, worst first; NaN comes before all others."""
        found = [
            DocumentLoss(source=self.names[source], document=document, loss=total / tokens, tokens=int(tokens))
            for (source, document), (total, tokens) in self._sums.items()
            if tokens
        ]
        found.sort(key=lambda one: (one.loss == one.loss, -one.loss, one.source, one.document))
        return found[:most]
