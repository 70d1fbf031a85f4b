"""`Together`: small micro-batches of text, several read at once.

What Python does for a batch takes as long as copying 10,000 tokens. So it is done once for as many micro-batches as
this rank takes next, up to `TOKENS`: one plan, one layout, one copy from each source.

    samples of this rank   0 | 2 | 4 | 6 | 8 | 10 | 12 | ...
    read at once           1 |   2   |       4         | ...     twice as many, as long as that is quick

Nothing can be told from it but the time: the end of the stream, and an error, come at the micro-batch that they belong
to.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from megaresume.batches.batch import Batch
from megaresume.batches.dataset import StreamDataset

#: tokens read at once, at most; more only if one micro-batch has more.
TOKENS = 1 << 16
#: seconds: what takes longer waits for a disk. Then one at a time is as fast, and nobody waits for all of them.
QUICK = 0.01


class Together:
    """Iterates once over micro-batches.

    Args:
        dataset: reads them.
        steps: see `StreamLoader.steps`.
    """

    def __init__(self, dataset: StreamDataset, steps: Iterable[tuple[range, Sequence[Sequence[int]]]]) -> None:
        self._dataset, self._steps = dataset, steps
        #: micro-batches.
        self._most = 1

    def __iter__(self) -> Iterator[Batch]:
        """Raises what reading them one by one raises, after the same micro-batches."""
        for block in self._blocks():
            begun = time.perf_counter()
            batches = self._read(block)
            quick = time.perf_counter() - begun < QUICK
            self._most = 2 * len(block) if quick else max(len(block) // 2, 1)
            yield from batches

    def _read(self, block: Sequence[Sequence[int]]) -> Iterable[Batch]:
        try:
            return self._dataset.read_several(block)
        except Exception:  # noqa: BLE001  raised again by the one that it belongs to
            return map(self._dataset.read, block)

    def _blocks(self) -> Iterator[list[Sequence[int]]]:
        stream = self._dataset.stream
        farthest = stream.block_samples
        block: list[Sequence[int]] = []
        shape, room, first = (0, 0), 0, 0
        try:
            for step, micro_steps in self._steps:
                for samples in micro_steps:
                    now = stream.shape_at(samples[0])
                    if block and (len(block) >= self._most or len(samples) > room or now != shape):
                        yield block
                        block = []
                    if not block:
                        shape, room, first = now, TOKENS // now[0], min(samples)
                    block.append(samples)
                    room -= len(samples)
                # Not so far that what a state needs would have to be planned again.
                if block and step.stop + len(step) - first > farthest:
                    yield block
                    block = []
        except Exception:
            if block:  # the error belongs to what comes after it
                yield block
            raise
        if block:
            yield block
