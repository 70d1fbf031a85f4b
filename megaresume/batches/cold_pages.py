"""`ColdPages`: tokens that are not in memory are asked for before they are read.

    a batch is read -> did it wait for a disk? -- no --> nothing more, and the question costs next to nothing
                                |
                               yes
                                v
    where this batch and the next ones lie -> neighbours joined -> the kernel reads all of them at once

Tokens are read through memory maps, a few KB here and a few there. Without this each waits for the one before, and the
kernel reads megabytes around it as well. Of a source that is shuffled in blocks, what lies around is wanted soon: there
it is asked for, a region at a time.

As in `megaresume.batches.ahead`, what is planned is dropped if other samples are read.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from megaresume.batches.ahead import Guess
from megaresume.data.source import TokenSource
from megaresume.stream.arrays import Int64Array
from megaresume.stream.data_yaml import ShuffleConfig
from megaresume.stream.kernel import DOCUMENT, LENGTH, OFFSET, SOURCE
from megaresume.stream.planner import Plan
from megaresume.stream.stream import Stream

#: bytes of tokens asked for before they are read.
AHEAD = 8 << 20
#: bytes that nobody wants, between two places that are asked for as one.
GAP = 32 << 10
#: bytes asked for by one call: the kernel reads no more than its read-ahead at one.
LONGEST = 128 << 10
#: seconds: what takes no longer did not wait for a disk, or not so long that it counts.
QUICK = 2e-4
#: places in a row that were in memory: then nothing is asked for any more.
CLEAN = 8
#: batches between two looks whether that is so, at most.
PATIENCE = 1024
#: places that are read at a time, of a file system that does nothing if it is told what will be needed (Lustre, FUSE).
THREADS = 16
#: batches that waited although they were asked for: then it is such a one.
IGNORED = 2
#: The advice of madvise, since Linux 5.14, to wait until the pages are there.
POPULATE_READ = 22


if sys.platform == "linux":
    from resource import RUSAGE_THREAD, getrusage

    _libc = ctypes.CDLL(None)
    _libc.madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)


def _waits() -> int:
    """The number of times that this thread has waited for a page that was not in memory."""
    return getrusage(RUSAGE_THREAD).ru_majflt


class ColdPages:
    """Tells the kernel which pages of tokens one process needs.

    Args:
        stream: in this process.
        seq_length: tokens a sample.
    """

    def __init__(self, stream: Stream, seq_length: int) -> None:
        self._stream = stream
        self._sources = {i: source for i, source in enumerate(stream.sources) if isinstance(source, TokenSource)}
        #: the most samples that are asked for ahead: never so many that a state must plan again.
        self._most = max(AHEAD // 4 // seq_length, 1)
        self._farthest = stream.block_samples
        self._guess = Guess()
        #: the sample up to which everything expected was asked for.
        self._told = 0
        #: whether to ask: at the start nobody knows, so it does.
        self._cold = False
        self._clean = self._pause = 0
        self._patience = 1
        #: the batch that is being read: when, waits of this thread before it, segments, whether they were asked for.
        self._begun = 0.0
        self._before = self._segments = 0
        self._was_told = False
        self._ignored = 0
        self._threads: ThreadPoolExecutor | None = None
        #: the regions of the sources that are shuffled in blocks.
        self._blocks = {
            i: _Regions(shuffle, source, seq_length)
            for i, source in self._sources.items()
            if (shuffle := stream.config.sources[i].shuffle) is not None
        }
        if sys.platform == "linux":
            self._expect(cold=True)

    def begin(self, plan: Plan, samples: Sequence[int]) -> None:
        """Note that the tokens of a plan are about to be read."""
        if self._cold:
            with contextlib.suppress(Exception):  # which whoever reads will meet
                self._ask(plan, samples)
            self._before = _waits()
        self._begun = time.perf_counter()

    def end(self) -> None:
        """Note that the tokens of the plan were read."""
        if sys.platform != "linux" or time.perf_counter() - self._begun < QUICK:
            return
        before, self._before = self._before, _waits()
        if not self._cold and self._before != before:
            self._clean, self._patience, self._pause = 0, 1, 0
            self._expect(cold=True)
        elif self._was_told and self._threads is None and self._before - before >= self._segments:
            self._ignored += 1
            if self._ignored == IGNORED:
                self._threads = ThreadPoolExecutor(THREADS, "megaresume-cold")

    def _ask(self, plan: Plan, samples: Sequence[int]) -> None:
        guess = self._guess
        if not guess.follow(samples):
            self._told = 0
        self._was_told, self._segments = samples[-1] < self._told, len(plan.table)
        if not self._was_told:
            for done in self._tell([plan.table]):
                done.result()
        if guess.next is None:
            return
        step = guess.length + guess.gap
        num = max(min(self._most // guess.length, self._farthest // step), 1)
        start = max(guess.next, self._told)
        if start > guess.next + step * num * 7 // 8:  # not one after another: so neighbours meet
            return
        self._told = min(guess.next + step * num, start + step * max(num // 8, 1))
        self._tell([self._stream.plan(run[0], run[-1] + 1).table for run in guess.runs(start, self._told)])

    def _tell(self, tables: Sequence[Int64Array]) -> list[Future[int]]:
        """Ask for the tokens of these segments, after a look at the first of them. What is done by threads."""
        reading: list[Future[int]] = []
        table = np.concatenate(tables) if tables else np.zeros((0, 5), np.int64)
        looked = False
        for i in np.unique(table[:, SOURCE]).tolist():
            source = self._sources.get(i)
            if source is None:
                continue
            mine = table[table[:, SOURCE] == i]
            view = source.token_view
            starts = source.token_starts(mine[:, DOCUMENT]) + mine[:, OFFSET]
            stops = np.minimum(starts + mine[:, LENGTH] + 1, len(view))  # and the label of the last one
            base, width = view.ctypes.data, view.itemsize
            starts, stops = base + starts * width, base + stops * width
            if i in self._blocks:
                starts, stops = self._blocks[i].around(starts, stops, source.lengths(mine[:, DOCUMENT]))
            if not looked and len(starts):
                looked = True
                self._look(view, int(starts[0] - base) // width)
                if not self._cold:
                    break
            for start, stop in joined(starts, stops):
                if self._threads is None:
                    _libc.madvise(start, stop - start, mmap.MADV_WILLNEED)
                else:
                    reading.append(self._threads.submit(_libc.madvise, start, stop - start, POPULATE_READ))
        return reading

    def _look(self, view: npt.NDArray[np.int64], place: int) -> None:
        """Read one token that was not asked for: is it in memory?"""
        self._pause -= 1
        if self._pause > 0:
            return
        before = _waits()
        view[place]
        if _waits() > before:
            self._clean, self._pause = 0, self._patience
            self._patience = min(2 * self._patience, PATIENCE)
        else:
            self._clean += 1
            if self._clean == CLEAN:
                self._expect(cold=False)

    def _expect(self, *, cold: bool) -> None:
        """Ask from now on, and have the kernel read nothing that is not asked for; or neither."""
        self._cold = cold
        how = mmap.MADV_RANDOM if cold else mmap.MADV_NORMAL
        for view in (source.token_view for source in self._sources.values()):
            if view.nbytes:
                start = view.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
                _libc.madvise(start, view.ctypes.data + view.nbytes - start, how)


class _Regions:
    """The file of a source that is shuffled in blocks, in regions, each of them asked for once, as a whole.

    The documents of a block are read a few at a time while those of others are; a region is a part of a block.
    """

    def __init__(self, shuffle: ShuffleConfig, source: TokenSource, seq_length: int) -> None:
        view = source.token_view
        self._seq_length = seq_length
        block = shuffle.block * view.itemsize * min(len(view) // max(len(source), 1), seq_length)
        self._base, self._end = view.ctypes.data, view.ctypes.data + view.nbytes
        self._size = max(min(block // 4, LONGEST) // mmap.PAGESIZE, 1) * mmap.PAGESIZE
        #: the regions of two windows that were asked for last.
        self._asked: OrderedDict[int, None] = OrderedDict()
        self._most = 2 * shuffle.window * (block // self._size + 2)

    def around(self, starts: Int64Array, stops: Int64Array, lengths: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The ranges to ask for instead of these bytes: the regions of them that were not asked for.

        Args:
            starts, stops: int64[n], addresses.
            lengths: int64[n], of their documents. Pieces of long ones lie among those of other blocks: they stay.

        Returns:
            as starts and stops.
        """
        alone = lengths > self._seq_length
        if alone.all():
            return starts, stops
        first, last = (starts[~alone] - self._base) // self._size, (stops[~alone] - 1 - self._base) // self._size
        touched = np.unique(np.minimum(first[:, None] + np.arange((last - first).max() + 1), last[:, None]))
        new = [region for region in touched.tolist() if region not in self._asked]
        self._asked.update(dict.fromkeys(new))
        while len(self._asked) > self._most:
            self._asked.popitem(last=False)
        begin = self._base + np.array(new, np.int64) * self._size
        end = np.minimum(begin + self._size, self._end)
        return np.concatenate([starts[alone], begin]), np.concatenate([stops[alone], end])


def joined(starts: Int64Array, stops: Int64Array) -> Iterator[tuple[int, int]]:
    """Ranges of bytes as whole pages, neighbours in one, none of them too long; in ascending order."""
    if not len(starts):
        return
    starts, order = starts // mmap.PAGESIZE * mmap.PAGESIZE, np.argsort(starts)
    starts, ends = starts[order], np.maximum.accumulate(stops[order])
    apart = np.flatnonzero(starts[1:] > ends[:-1] + GAP)
    for start, end in zip(starts[[0, *(apart + 1)]].tolist(), ends[[*apart, -1]].tolist(), strict=True):
        for first in range(start, end, LONGEST):
            yield first, min(first + LONGEST, end)
