"""`Ahead`: places of shards, and images of folders, that are read before they are needed, several at a time.

    wanted, in the order of need -> neighbours joined -> threads: cache, request -> bytes, until they are released

Nothing here can change what is read: a place that is not here, or whose request failed, is read by whoever needs it,
who then meets the error. Local shards are not read: the kernel is told what will be needed, to have it in its cache.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megaresume.data.shard_files import Place, RecordError, ShardFiles
from megaresume.stream.errors import MegaresumeError

log = logging.getLogger(__name__)

#: bytes that nobody wants, between two places that are read by one request.
GAP = 64 << 10
#: bytes of a request of several places.
LONGEST = 1 << 20


@dataclass(slots=True)
class _Entry:
    users: int = 0
    done: bool = False
    #: None if not read here.
    data: bytes | None = None


class Ahead:
    """Reads ahead for one loader in one process. Threads end with `close`.

    Args:
        requests: at a time.
    """

    def __init__(self, requests: int) -> None:
        self.requests = requests
        #: bytes of places that are wanted or here.
        self.held = 0
        self._entries: dict[Place, _Entry] = {}
        self._waiting: deque[list[Place]] = deque()
        self._checking: set[tuple[ShardFiles, str]] = set()
        self._readers: set[ShardFiles] = set()
        self._threads = 0
        self._changed = threading.Condition()
        self._closed = False
        self._owner = os.getpid()

    def want(self, places: Iterable[Place]) -> None:
        """Read these, in the order in which they will be needed; each is kept until it was released as often."""
        new: list[Place] = []
        with self._changed:
            for place in places:
                entry = self._entries.get(place)
                if entry is None:
                    entry = self._entries[place] = _Entry()
                    self.held += place.nbytes
                    new.append(place)
                entry.users += 1
            remote = [place for place in new if place.held]
            self._waiting += joined(remote)
            self._readers |= {place.files for place in remote}
            for files in self._readers:
                files.ahead = self
            if self._waiting and not self._threads and not self._start():
                self._waiting.clear()
                for place in remote:
                    self._entries[place].done = True
            self._changed.notify_all()
        for place in new:
            if not place.held:
                place.files.will_need(place.path, place.offset, place.nbytes)

    def take(self, place: Place) -> bytes | None:
        """The bytes of a place, as soon as they are here; None: to be read by the caller."""
        if os.getpid() != self._owner:  # forked: the threads are in the parent
            return None
        with self._changed:
            entry = self._entries.get(place)
            if entry is None or not place.held:
                return None
            while not entry.done and not self._closed:
                self._changed.wait()
            return entry.data

    def release(self, places: Iterable[Place]) -> None:
        """They were used, or will not be."""
        with self._changed:
            for place in places:
                if (entry := self._entries.get(place)) is None:  # closed
                    continue
                entry.users -= 1
                if not entry.users:
                    del self._entries[place]
                    self.held -= place.nbytes

    def close(self) -> None:
        """Read nothing more."""
        if os.getpid() != self._owner:  # forked, perhaps while a thread of the parent held the lock
            return
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._entries.clear()
            self._changed.notify_all()
        for files in self._readers:
            if files.ahead is self:
                files.ahead = None

    def _start(self) -> bool:
        """One more thread; False: the system has none left, and those that there are continue."""
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
            with self._changed:
                # Not before the first request: it makes the connection that the others share.
                while self._waiting and self._threads < self.requests and self._start():
                    pass

    def _next(self) -> list[Place] | None:
        """The next request, of what is still wanted; None: closed."""
        with self._changed:
            while True:
                while not self._waiting:
                    if self._closed:
                        return None
                    self._changed.wait()
                if places := [place for place in self._waiting.popleft() if place in self._entries]:
                    return places

    def _fetch(self, places: Sequence[Place]) -> None:
        """What the cache has not, by one request; if it fails, for good, its places are done without bytes."""
        missing = places
        read: dict[Place, bytes] = {}
        try:
            self._check(places[0])
            missing = [place for place in places if not self._kept(place)]
            if missing:
                read = _read(missing)
        except RecordError:
            pass  # which is for its reader to say
        except Exception as error:  # noqa: BLE001  whatever it is: who needs the bytes must not wait forever
            what = error.headline if isinstance(error, MegaresumeError) else repr(error)
            log.warning("megaresume: %s (read ahead; it is read again when it is needed)", what)
        self._done(missing, read)
        for place, data in read.items():
            place.files.keep(place, data)

    def _kept(self, place: Place) -> bool:
        data = place.files.kept(place)
        if data is not None:
            self._done([place], {place: data})
        return data is not None

    def _done(self, places: Sequence[Place], read: Mapping[Place, bytes]) -> None:
        with self._changed:
            for place in places:
                if (entry := self._entries.get(place)) is not None:
                    entry.done, entry.data = True, read.get(place)
            self._changed.notify_all()

    def _check(self, place: Place) -> None:
        """Ask for the size of a shard, but not in two threads at once."""
        if place.whole:
            return
        shard = (place.files, place.path)
        with self._changed:
            while shard in self._checking:
                self._changed.wait()
            self._checking.add(shard)
        try:
            place.files.check(place.path, place.size)
        finally:
            with self._changed:
                self._checking.discard(shard)
                self._changed.notify_all()


def _read(places: Sequence[Place]) -> dict[Place, bytes]:
    """Places of one request."""
    first = places[0]
    if first.whole:
        return {first: first.files.read_whole(first.path)}
    start = first.offset
    data = first.files.read(first.path, start, max(place.stop for place in places) - start)
    return {place: data[place.offset - start : place.stop - start] for place in places}


def joined(places: Sequence[Place]) -> list[list[Place]]:
    """Places to requests: neighbours in one, in the order in which the first of each is needed."""
    need = {place: k for k, place in enumerate(places)}
    requests: list[list[Place]] = []
    for place in sorted(places, key=lambda place: (id(place.files), place.path, place.offset)):
        last = requests[-1] if requests else None
        if (
            last is not None
            and (last[-1].files, last[-1].path) == (place.files, place.path)
            and place.offset - last[-1].stop <= GAP
            and place.stop - last[0].offset <= LONGEST
        ):
            last.append(place)
        else:
            requests.append([place])
    return sorted(requests, key=lambda request: min(need[place] for place in request))
