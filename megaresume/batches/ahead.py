"""Read ahead what the next batches of one process need: records of shards, tokens that are not in memory.

`ReadAhead` has records read by the plan, which knows them:

    sample numbers of this rank, or worker -> plan -> records -> where they lie -> `megaresume.data.read_ahead.Ahead`

`ColdPages` asks for tokens:

    a batch is read -> did it wait for a disk? -- no --> nothing more, and the question costs next to nothing
                                |
                               yes
                                v
    where this batch and the next ones lie -> neighbours joined -> the kernel reads all of them at once

Tokens are read through memory maps, a few KB here and a few there. Without this each waits for the one before, and the
kernel reads megabytes around it as well. Of a source that is shuffled in blocks, what lies around is wanted soon: there
it is asked for, a region at a time.

Both follow the reader: what is planned is dropped if other samples are read. So they can make a loader faster, and
change nothing. Of a loader that is not ours, Megatron's or torch's, nobody says which samples come next: then it is
guessed from those that came, and a wrong guess costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from megaresume.data.source import TokenSource
from megaresume.stream.data_yaml import ShuffleConfig
from megaresume.stream.errors import MegaresumeError, UsageError
from megaresume.stream.kernel import DOCUMENT, LENGTH, OFFSET, SOURCE
from megaresume.stream.planner import Plan
from megaresume.stream.stream import Stream

if TYPE_CHECKING:
    from megaresume.data.read_ahead import Ahead
    from megaresume.data.shard_files import Place

#: MiB of records that are held, and requests to a store at a time, unless more or fewer are asked for.
MEMORY, REQUESTS = 64, 32
#: segments planned ahead, however small they are.
FARTHEST = 1 << 16
#: bytes read ahead at first, doubled until they are what is allowed: the first batch waits for little besides its own.
FIRST = 2 << 20

#: The most samples that are planned together.
TOGETHER = 64
#: blocks of the stream that are planned ahead: it keeps more, so that nothing is planned twice.
BLOCKS = 24

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

Int64Array = npt.NDArray[np.int64]


class Guess:
    """A guess at the samples asked for next: runs of consecutive ones, as long as the last one, at equal distances."""

    def __init__(self) -> None:
        self.gap, self.length = 0, 1
        #: the sample expected next; None if not known.
        self.next: int | None = None
        self._odd: int | None = None

    def follow(self, samples: Sequence[int]) -> bool:
        """Whether these come as expected. Two runs one after the other that do not begin another sequence."""
        first = samples[0]
        as_expected = True
        for k, sample in enumerate(samples):
            if k + 1 == len(samples) or samples[k + 1] != sample + 1:
                as_expected &= self._follow(first, sample + 1)
                first = samples[min(k + 1, len(samples) - 1)]
        return as_expected

    def _follow(self, first: int, stop: int) -> bool:
        if first != self.next or (self.gap and stop - first != self.length):
            if self._odd is None or first < self._odd:
                self._odd = stop
                return False
            self.gap = first - self._odd
        self._odd, self.length, self.next = None, stop - first, stop + self.gap
        return True

    def runs(self, start: int, stop: int | None = None) -> Iterator[range]:
        """The runs expected from ``start``, where one begins, to ``stop``."""
        for first in count(start, self.length + self.gap):
            if stop is not None and first >= stop:
                return
            yield range(first, first + self.length)


def use_cache(sources: Iterable[object], directory: str | os.PathLike[str], *, gib: float) -> None:
    """Have a directory on a local disk keep what is read of object stores.

    Raises:
        UsageError: nothing fits into it.
    """
    if not 0 < gib < math.inf:
        raise UsageError(
            "bad size for a cache of records",
            found=f"cache_gib={gib}",
            expected="more than 0 GiB",
            action="leave out cache_dir for no cache",
        )
    shards: list[Any] = [source for source in sources if hasattr(source, "places")]
    if shards:
        from megaresume.data.disk_cache import DiskCache

        cache = DiskCache(Path(directory), int(gib * (1 << 30)))
        for source in shards:
            source.files.cache = cache


class ReadAhead:
    """Reads ahead for one loader.

    Args:
        stream: the stream, in this process.
        upcoming: sample numbers of each micro-batch that will be read, in order; None: to be guessed.
        memory: bytes of records that are held; more only if one micro-batch needs more.
        requests: to a store at a time.
    """

    def __init__(
        self,
        stream: Stream,
        upcoming: Iterable[Sequence[int]] | None,
        *,
        memory: int = MEMORY << 20,
        requests: int = REQUESTS,
    ) -> None:
        self._stream = stream
        self._guess = Guess() if upcoming is None else None
        self._upcoming: Iterator[Sequence[int]] = iter(upcoming or ())
        self._memory = memory
        self._window = min(FIRST, memory)
        self._sources = {i: source for i, source in enumerate(stream.sources) if hasattr(source, "places")}
        #: (samples, segments, number of places of their records) of each micro-batch that is planned and not yet read;
        #: and these places. So Python's collector has few objects to visit: it takes longer than the rest of this.
        self._planned: deque[tuple[tuple[int, ...], int, int]] = deque()
        self._places: deque[Place] = deque()
        self._segments = 0
        #: the samples that were planned last: the first one, where the segments of each begin, their records.
        self._first = -2
        self._starts: list[int] = [0, 0]
        self._pairs: list[list[int]] = []
        self._ahead: Ahead | None = None
        if self._sources and memory:
            from megaresume.data.read_ahead import Ahead

            self._ahead = Ahead(requests)

    @contextmanager
    def reading(self, samples: Sequence[int]) -> Iterator[None]:
        """A context around the reading of the next micro-batch."""
        if self._ahead is None:
            yield
            return
        if self._guess is not None:
            self._follow(self._guess, samples, self._ahead)
        self._plan(self._ahead)
        self._ahead.attend()
        if self._planned and self._planned[0][0] != tuple(samples):
            self.close()
        if not self._planned:
            yield
            return
        _, segments, num_places = self._planned.popleft()
        places = [self._places.popleft() for _ in range(num_places)]
        self._segments -= segments
        try:
            yield
        finally:
            self._ahead.release(places)

    def close(self) -> None:
        """Stop reading."""
        self._planned.clear()
        self._places.clear()
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _follow(self, guess: Guess, samples: Sequence[int], ahead: Ahead) -> None:
        """Read these, together, and those that come after them, if that can be told."""
        as_expected = guess.follow(samples)
        if self._planned and self._planned[0][0] == tuple(samples):
            return
        ahead.release(self._places)
        self._places.clear()
        self._planned.clear()
        self._segments = 0
        coming = guess.runs(guess.next) if as_expected and guess.next is not None else ()
        self._upcoming = chain([samples], coming)

    def _plan(self, ahead: Ahead) -> None:
        # Half of it at once: so neighbours meet in one request.
        if ahead.held > self._window // 2 or self._segments > FARTHEST // 2:
            return
        farthest = BLOCKS * self._stream.block_samples
        if self._span > farthest // 2:
            return
        wanted: list[Place] = []
        room = self._window - ahead.held
        self._window = min(2 * self._window, self._memory)
        while room > 0 and self._segments < FARTHEST:
            if self._span > farthest:
                break
            try:
                samples = next(self._upcoming)
                segments, places = self._records_of(samples)
            except (StopIteration, MegaresumeError):  # which whoever reads on will meet
                self._upcoming = iter(())
                break
            self._planned.append((tuple(samples), segments, len(places)))
            self._places += places
            self._segments += segments
            wanted += places
            room -= sum(place.nbytes for place in places)
        if wanted:
            ahead.want(wanted)

    @property
    def _span(self) -> int:
        """The number of samples of all ranks, from the first that is planned to the last one."""
        return self._planned[-1][0][0] - self._planned[0][0][0] if self._planned else 0

    def _records_of(self, samples: Sequence[int]) -> tuple[int, list[Place]]:
        """Segments of these samples, and where their records lie."""
        segments = 0
        places: list[Place] = []
        for sample in samples:
            records = self._records(sample)
            segments += len(records)
            for source, document in records:
                if source in self._sources:
                    places += cast(Any, self._sources[source]).places(document)
        return segments, places

    def _records(self, sample: int) -> list[list[int]]:
        """Source and document of each segment of a sample; of the next ones too while one follows the other."""
        num = len(self._starts) - 1
        if not 0 <= sample - self._first < num:
            # Of others' samples between two of this rank nothing is asked.
            num = min(2 * num, TOGETHER) if sample == self._first + num else 1
            try:
                plan = self._stream.plan(sample, sample + num)
            except MegaresumeError:  # the stream ends before that
                plan = self._stream.plan(sample, sample + 1)
            self._first, self._starts = sample, plan.starts.tolist()
            self._pairs = plan.table[:, [SOURCE, DOCUMENT]].tolist()
        start, stop = self._starts[sample - self._first : sample - self._first + 2]
        return self._pairs[start:stop]


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
