"""`Ahead` reads places of shards, and images of folders, before they are needed, several at a time.

    wanted, in the order of need -> neighbours joined -> threads: cache, request -> bytes, until they are released

A new place joins requests that wait or are running: so each part of a shard is requested about once, in few requests,
however the order scatters its records.

It cannot change what is read: whoever needs a place that is missing, or whose request failed, reads it directly and
meets the error there. Local shards are not read: the kernel is told what will be needed, so that it caches it.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from megaresume.data.shard_files import Place, RecordError, ShardFiles, Span, is_small
from megaresume.stream.errors import MegaresumeError

log = logging.getLogger(__name__)

#: gap in bytes between two places of small records that one request still reads.
GAP = 64 << 10
#: The same gap for large places, as a fraction of their size: it may be a whole other record.
BETWEEN_LARGE = 1 / 8
#: most bytes of a request for several places.
LONGEST = 1 << 20
#: requests to be made next that no longer change, per concurrent request.
SOON = 2
#: seconds until an idle thread ends: nothing closes the `Ahead` of a dropped `StreamDataset`.
IDLE = 20.0


@dataclass(slots=True, eq=False)
class _Reading:
    """A range that is being read, or soon will be."""

    start: int
    stop: int
    #: the places in the range, all of one file; grows when others within it are wanted.
    places: list[Place]

    @property
    def at(self) -> tuple[int, str, int]:
        """The position where it begins."""
        return _at(self.places[0], self.start)

    def has(self, place: Place) -> bool:
        """Whether it includes the bytes of a place."""
        its = self.places[0]
        same = place.files is its.files and place.path == its.path and not place.whole
        return same and self.start <= place.offset and place.stop <= self.stop


def _at(place: Place, offset: int) -> tuple[int, str, int]:
    return id(place.files), place.path, offset


class Ahead:
    """Reads ahead for one loader in one process. Threads end with `close`.

    Args:
        requests: the number at a time.
    """

    def __init__(self, requests: int) -> None:
        self.requests = requests
        #: bytes of places that are wanted or here.
        self.held = 0
        #: how often each place is wanted; and the bytes of those that are here, None if they are not read here.
        self._users: dict[Place, int] = {}
        self._read: dict[Place, bytes | None] = {}
        #: places that a caller waits for.
        self._awaited: set[Place] = set()
        #: requests in the order of need; and those that are running.
        self._waiting: deque[list[Place]] = deque()
        self._under_way: list[_Reading] = []
        self._checking: set[tuple[ShardFiles, str]] = set()
        self._readers: set[ShardFiles] = set()
        self._threads = 0
        lock = threading.Lock()
        #: something was read or checked; a request is waiting: one thread is woken for each request.
        self._changed, self._given = threading.Condition(lock), threading.Condition(lock)
        self._closed = False
        self._owner = os.getpid()

    def want(self, places: Iterable[Place]) -> None:
        """Read these, in the order of need; each is kept until it is released as often as it was wanted."""
        new: list[Place] = []
        with self._changed:
            for place in places:
                users = self._users.get(place, 0)
                self._users[place] = users + 1
                if not users:
                    self.held += place.nbytes
                    new.append(place)
            remote = [place for place in new if place.held]
            if remote:
                self._queue(remote)
            self._readers |= {place.files for place in remote}
            self.attend()
            if self._waiting and not self._threads and not self._start():
                self._read |= dict.fromkeys(chain(*self._waiting))
                self._waiting.clear()
                self._changed.notify_all()
            self._given.notify(len(self._waiting))
        for place in new:
            if not place.held:
                place.files.will_need(place.path, place.offset, place.nbytes)

    def attend(self) -> None:
        """Be the `Ahead` that its files ask; another loader of the same ones, of a validation say, may have been."""
        for files in self._readers:
            files.ahead = self

    def take(self, place: Place) -> bytes | None:
        """The bytes of a place, as soon as they are here; None if the caller must read it."""
        if os.getpid() != self._owner:  # forked: the threads are in the parent
            return None
        if (data := self._read.get(place)) is not None:  # usually, and then without waiting for a lock
            return data
        with self._changed:
            if place not in self._users or not place.held:
                return None
            # Also ends when nobody keeps it: another loader of the same shards may have wanted it, and released it.
            while place in self._users and place not in self._read and not self._closed:
                self._awaited.add(place)
                self._changed.wait()
            self._awaited.discard(place)
            return self._read.get(place)

    def release(self, places: Iterable[Place]) -> None:
        """Release places that were used, or will not be."""
        with self._changed:
            for place in places:
                users = self._users.get(place, 0)  # 0 after `close`
                if users > 1:
                    self._users[place] = users - 1
                elif users:
                    del self._users[place]
                    self._read.pop(place, None)
                    self.held -= place.nbytes
            if self._awaited:
                self._changed.notify_all()

    def close(self) -> None:
        """Stop reading."""
        if os.getpid() != self._owner:  # forked, perhaps while a thread of the parent held the lock
            return
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._users.clear()
            self._read.clear()
            self._changed.notify_all()
            self._given.notify_all()
        for files in self._readers:
            if files.ahead is self:
                files.ahead = None

    def _queue(self, places: Sequence[Place]) -> None:
        """Add these to requests that are running or soon will be, if they lie within one; else queue new ones."""
        soon = list(islice(self._waiting, SOON * self.requests))  # not more, or what is needed first would come later
        waiting = [_Reading(*request[0].files.around(request), request) for request in soon]
        ranges = sorted([*self._under_way, *waiting], key=lambda reading: reading.at)
        starts = [reading.at for reading in ranges]
        others = [place for request in islice(self._waiting, len(soon), None) for place in request]
        for place in places:
            before = bisect_right(starts, _at(place, place.offset)) - 1
            if before >= 0 and ranges[before].has(place):
                ranges[before].places.append(place)
            else:
                others.append(place)
        # Joined with those that wait: adjacent places become one request, whenever they were wanted.
        self._waiting = deque([*soon, *joined([place for place in others if place in self._users])])

    def _start(self) -> bool:
        """Start one more thread; False if the system allows no more, and the others continue."""
        try:
            threading.Thread(target=self._work, name="megaresume-ahead", daemon=True).start()
        except RuntimeError as error:
            log.warning("megaresume: %s: %d requests at a time are read ahead", error, self._threads)
            self.requests = max(self._threads, 1)
            return False
        self._threads += 1
        return True

    def _work(self) -> None:
        while (places := self._next()) is not None:
            self._fetch(places)
            if self._threads < self.requests:
                with self._changed:
                    # Not before the first request, which makes the connection that the others share.
                    while self._waiting and self._threads < self.requests and self._start():
                        pass

    def _next(self) -> list[Place] | None:
        """The next request for places still wanted; None: closed, or idle for a while."""
        with self._changed:
            while True:
                while not self._waiting:
                    if self._closed:
                        return None
                    if not self._given.wait(IDLE) and not self._waiting:
                        self._threads -= 1
                        return None
                if places := [place for place in self._waiting.popleft() if place in self._users]:
                    return places

    def _fetch(self, places: Sequence[Place]) -> None:
        """Fetch what the cache lacks; if a request fails for good, its places get no bytes."""
        files, missing = places[0].files, places
        try:
            begun = self._check(places)
            here = files.kept(places)
            self._done(here)
            missing = [place for place in places if place not in here]
        except BaseException as error:  # noqa: BLE001  a panic of obstore is no Exception
            self._failed(error)
            self._done(dict.fromkeys(missing))
            return
        for request in joined(missing):  # several, if the cache has what lies between
            reading = _Reading(*files.around(request), request)
            span: Span | None = None
            with self._changed:
                self._under_way.append(reading)
            try:
                if begun is not None and begun.start <= reading.start and reading.stop <= begun.stop:
                    span = begun
                else:
                    span = files.read_span(request[0], reading.start, reading.stop)
            except BaseException as error:  # noqa: BLE001  a panic of obstore is no Exception
                self._failed(error)
            with self._changed:
                self._under_way.remove(reading)
            self._done({place: None if span is None else span.of(place) for place in reading.places})
            if span is not None:
                files.keep(reading.places, span)

    @staticmethod
    def _failed(error: BaseException) -> None:
        """Log any error: whoever needs the bytes must not wait forever."""
        if isinstance(error, RecordError):
            return  # the reader reports it
        what = error.headline if isinstance(error, MegaresumeError) else repr(error)
        log.warning("megaresume: %s (read ahead; it is read again when it is needed)", what)

    def _done(self, read: Mapping[Place, bytes | None]) -> None:
        """Record that these places are here, or will not be."""
        if not read:
            return
        with self._changed:
            self._read |= {place: data for place, data in read.items() if place in self._users}
            if not self._awaited.isdisjoint(read):
                self._changed.notify_all()

    def _check(self, places: Sequence[Place]) -> Span | None:
        """Check the shard of a request, never in two threads at once; returns its bytes if the check has read them."""
        place = places[0]
        if place.whole or place.files.is_checked(place.path):
            return None
        shard = (place.files, place.path)
        with self._changed:
            while shard in self._checking:
                self._changed.wait()
            self._checking.add(shard)
        try:
            return place.files.check_by_reading(place, *place.files.around(places))
        finally:
            with self._changed:
                self._checking.discard(shard)
                self._changed.notify_all()


def joined(places: Sequence[Place]) -> list[list[Place]]:
    """Group places into requests: neighbours in one, ordered by the first place that each needs."""
    if len(places) == 1:
        return [list(places)]
    need = {place: k for k, place in enumerate(places)}
    requests: list[list[Place]] = []
    for place in sorted(places, key=lambda place: (id(place.files), place.path, place.offset)):
        last = requests[-1] if requests else None
        if (
            last is not None
            and (last[-1].files, last[-1].path) == (place.files, place.path)
            and place.offset - last[-1].stop <= GAP * (1 if is_small(place) else BETWEEN_LARGE)
            and place.stop - last[0].offset <= LONGEST
        ):
            last.append(place)
        else:
            requests.append([place])
    return sorted(requests, key=lambda request: min(need[place] for place in request))
