"""Read ahead the records of shards that the next batches of one process need.

    sample numbers of this rank, or worker -> plan -> records -> their places -> `megaresume.data.read_ahead.Ahead`

It follows the reader: plans are dropped if other samples are read. So it makes loading faster and changes nothing. A
loader that is not ours (Megatron's, torch's) does not announce its next samples: they are guessed from the previous
ones, and a wrong guess only costs time.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megaresume.stream.errors import MegaresumeError, UsageError
from megaresume.stream.kernel import DOCUMENT, SOURCE
from megaresume.stream.stream import Stream

if TYPE_CHECKING:
    from megaresume.data.read_ahead import Ahead
    from megaresume.data.shard_files import Place

#: Defaults: MiB of records held, and concurrent requests to a store.
MEMORY, REQUESTS = 64, 32
#: the most segments planned ahead, however small they are.
FARTHEST = 1 << 16
#: bytes read ahead at first, doubled up to the limit, so that the first batch waits for little besides its own records.
FIRST = 2 << 20

#: The most samples that are planned together.
TOGETHER = 64
#: blocks of the stream planned ahead: fewer than it keeps, so that nothing is planned twice.
BLOCKS = 24


class Guess:
    """Guesses the next samples: runs of consecutive ones, as long as the last run, at equal distances."""

    def __init__(self) -> None:
        self.gap, self.length = 0, 1
        #: the sample expected next; None if not known.
        self.next: int | None = None
        self._odd: int | None = None

    def follow(self, samples: Sequence[int]) -> bool:
        """Whether these samples were expected. Two unexpected runs in a row begin another sequence."""
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
        """The expected runs from ``start``, the beginning of one, to ``stop``."""
        for first in count(start, self.length + self.gap):
            if stop is not None and first >= stop:
                return
            yield range(first, first + self.length)


def use_cache(sources: Iterable[object], directory: str | os.PathLike[str], *, gib: float) -> None:
    """Cache what is read from object stores in a directory on a local disk.

    Raises:
        UsageError: it has no room.
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
        upcoming: sample numbers of each micro-batch that will be read, in order; None: guess them.
        memory: bytes of records held; exceeded only if one micro-batch needs more.
        requests: concurrent, to one store.
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
        #: and these places. Few objects, because Python's collector would take longer than all the rest.
        self._planned: deque[tuple[tuple[int, ...], int, int]] = deque()
        self._places: deque[Place] = deque()
        self._segments = 0
        #: the samples planned last: the first one, where the segments of each begin, their records.
        self._first = -2
        self._starts: list[int] = [0, 0]
        self._pairs: list[list[int]] = []
        self._ahead: Ahead | None = None
        if self._sources and memory:
            from megaresume.data.read_ahead import Ahead

            self._ahead = Ahead(requests)

    @contextmanager
    def reading(self, samples: Sequence[int]) -> Iterator[None]:
        """A context for reading the next micro-batch."""
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
        """Read these samples' records together, and those of the next ones, if they can be guessed."""
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
        # Half of the limit at once, so that neighbouring records share a request.
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
            except (StopIteration, MegaresumeError):  # the reader will raise it
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
        """The number of samples, on all ranks, from the first planned one to the last."""
        return self._planned[-1][0][0] - self._planned[0][0][0] if self._planned else 0

    def _records_of(self, samples: Sequence[int]) -> tuple[int, list[Place]]:
        """Number of segments of these samples, and the places of their records."""
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
        """Source and document of each segment of a sample; plans following samples too if samples are consecutive."""
        num = len(self._starts) - 1
        if not 0 <= sample - self._first < num:
            # Do not plan the samples of other ranks in between.
            num = min(2 * num, TOGETHER) if sample == self._first + num else 1
            try:
                plan = self._stream.plan(sample, sample + num)
            except MegaresumeError:  # the stream ends before that
                plan = self._stream.plan(sample, sample + 1)
            self._first, self._starts = sample, plan.starts.tolist()
            self._pairs = plan.table[:, [SOURCE, DOCUMENT]].tolist()
        start, stop = self._starts[sample - self._first : sample - self._first + 2]
        return self._pairs[start:stop]
