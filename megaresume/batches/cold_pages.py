"""`ColdPages`: asks the kernel for tokens that are not in memory before they are read.

    a batch is read -> did it wait for a disk? -- no --> nothing more; the check costs next to nothing
                                |
                               yes
                                v
    the places of this batch and the next ones -> join neighbours -> the kernel reads all of them at once

Tokens are read through memory maps, a few KB at a time. Without this, each read waits for the previous one, and the
kernel also reads megabytes around it. In a source shuffled in blocks, the surroundings are needed soon, so there
they are requested, a region at a time.

As in `megaresume.batches.ahead`, plans are dropped if other samples are read.
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

#: bytes of tokens requested ahead.
AHEAD = 8 << 20
#: the largest gap, in bytes, between two places that are requested as one.
GAP = 32 << 10
#: bytes requested by one call, as the kernel reads at most its read-ahead per call.
LONGEST = 128 << 10
#: seconds: a faster read did not wait for a disk, or not noticeably.
QUICK = 2e-4
#: after this many places in a row that were in memory, stop requesting.
CLEAN = 8
#: the most batches between two checks of that.
PATIENCE = 1024
#: concurrent reads, for file systems that ignore the advice of what will be needed (Lustre, FUSE).
THREADS = 16
#: after this many batches that waited although they were requested, take the file system for one of those.
IGNORED = 2
#: The advice of madvise, since Linux 5.14, that waits until the pages are read.
POPULATE_READ = 22


if sys.platform == "linux":
    from resource import RUSAGE_THREAD, getrusage

    _libc = ctypes.CDLL(None)
    _libc.madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)


def _waits() -> int:
    """How often this thread has waited for a page that was not in memory."""
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
        #: the most samples requested ahead: few enough that a state needs no planning again.
        self._most = max(AHEAD // 4 // seq_length, 1)
        self._farthest = stream.block_samples
        self._guess = Guess()
        #: the sample up to which everything expected was requested.
        self._told = 0
        #: whether to request: at first yes, since it is not known.
        self._cold = False
        self._clean = self._pause = 0
        self._patience = 1
        #: the batch being read: start time, this thread's waits before it, segments, whether they were requested.
        self._begun = 0.0
        self._before = self._segments = 0
        self._was_told = False
        self._ignored = 0
        self._threads: ThreadPoolExecutor | None = None
        #: the regions of the sources shuffled in blocks.
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
            with contextlib.suppress(Exception):  # the reader will raise it
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
        if start > guess.next + step * num * 7 // 8:  # not one by one, so that neighbours are joined
            return
        self._told = min(guess.next + step * num, start + step * max(num // 8, 1))
        self._tell([self._stream.plan(run[0], run[-1] + 1).table for run in guess.runs(start, self._told)])

    def _tell(self, tables: Sequence[Int64Array]) -> list[Future[int]]:
        """Request the tokens of these segments, after probing the first. Returns the work done by threads."""
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
            stops = np.minimum(starts + mine[:, LENGTH] + 1, len(view))  # including the last label
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
        """Read one token that was not requested, to see whether it is in memory."""
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
        """Cold: request from now on, and turn the kernel's own read-ahead off; otherwise the reverse."""
        self._cold = cold
        how = mmap.MADV_RANDOM if cold else mmap.MADV_NORMAL
        for view in (source.token_view for source in self._sources.values()):
            if view.nbytes:
                start = view.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
                _libc.madvise(start, view.ctypes.data + view.nbytes - start, how)


class _Regions:
    """The file of a source shuffled in blocks, split into regions; each is requested once, as a whole.

    The documents of several blocks are read in turn, a few at a time; a region is a part of a block.
    """

    def __init__(self, shuffle: ShuffleConfig, source: TokenSource, seq_length: int) -> None:
        view = source.token_view
        self._seq_length = seq_length
        block = shuffle.block * view.itemsize * min(len(view) // max(len(source), 1), seq_length)
        self._base, self._end = view.ctypes.data, view.ctypes.data + view.nbytes
        self._size = max(min(block // 4, LONGEST) // mmap.PAGESIZE, 1) * mmap.PAGESIZE
        #: the regions of two windows that were requested last.
        self._asked: OrderedDict[int, None] = OrderedDict()
        self._most = 2 * shuffle.window * (block // self._size + 2)

    def around(self, starts: Int64Array, stops: Int64Array, lengths: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The ranges to request instead of these bytes: the regions they are in, unless requested already.

        Args:
            starts, stops: int64[n], addresses.
            lengths: int64[n], of their documents. Pieces of long ones lie among other blocks, and are returned as
            given.

        Returns:
            starts and stops, in the same form.
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
    """Join ranges of bytes into whole pages, merging neighbours up to a maximum length; ascending."""
    if not len(starts):
        return
    starts, order = starts // mmap.PAGESIZE * mmap.PAGESIZE, np.argsort(starts)
    starts, ends = starts[order], np.maximum.accumulate(stops[order])
    apart = np.flatnonzero(starts[1:] > ends[:-1] + GAP)
    for start, end in zip(starts[[0, *(apart + 1)]].tolist(), ends[[*apart, -1]].tolist(), strict=True):
        for first in range(start, end, LONGEST):
            yield first, min(first + LONGEST, end)
