"""`Store`: the files of a checkpoint root in an object store, in addition to its small `Objects`.

    upload     a file: large ones in parts, several at a time; each part compared with what the store has received
               (`receipts`)
    download   a file: in ranges, several at a time, hashed in order as they arrive; after a kill, the next try reuses
               them; verified as a whole by its checksum

At most `BUFFERS` parts are in memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from megaresume.checkpoint.records.manifest import FileEntry, checksum_file
from megaresume.checkpoint.store.buffer import Buffer
from megaresume.checkpoint.store.objects import NotAsSavedError, Objects
from megaresume.checkpoint.store.receipts import UploadedParts, compares_crc32
from megaresume.files import fsync_dir, fsync_file, make_dir, open_file, read_error, read_file, write_error
from megaresume.stream.errors import CheckpointError, CorpusError

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from megaresume.checkpoint.store.threads import LastingThreads

T = TypeVar("T")


class GaveWayError(Exception):
    """Raised if an upload was stopped so that another one comes first."""


class ChangedSourceError(CheckpointError):
    """Raised if a local file to be copied differs from what was saved."""


#: bytes of a part of an upload, and of a range of a download; more if S3's limit on the number of parts requires it.
PART = 16 << 20
MOST_PARTS = 10_000
#: concurrent requests; concurrent files; parts in memory.
REQUESTS, FILES = 8, 4
BUFFERS = REQUESTS + FILES


class Store(Objects):
    """The files of a root. Safe to use from several threads.

    Args:
        url: ``s3://bucket/run``: names are relative to it.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._buffers = threading.BoundedSemaphore(BUFFERS)
        #: spare buffers for parts; with those in use, at most `BUFFERS`.
        self._spare: list[Buffer] = []
        self._pools: tuple[int, LastingThreads, LastingThreads] | None = None
        #: whether the store compares a CRC32; None: not tested yet.
        self._is_compared: bool | None = None
        self._asking = threading.Lock()

    def reopen(self) -> None:
        """Reconnect, with the credentials available now."""
        super().reopen()
        self._is_compared = self._is_compared or None

    def upload_all(
        self, files: Iterable[tuple[Path, str, FileEntry]], gives_way: Callable[[], bool] = lambda: False
    ) -> list[str]:
        """Upload files.

        Args:
            files: the file, its name in the store, and its size and, if known, checksum.
            gives_way: whether to stop, called before each file and part.

        Returns:
            their checksums, 32 hex digits, in this order.

        Raises:
            ChangedSourceError: a file differs from what was saved.
            SetupError: the store does not answer, or refuses.
            GaveWayError: ``gives_way`` stopped it.
        """
        try:
            return _all(self._of_files.submit(self._upload, *one, gives_way) for one in files)
        finally:
            for buffer in self._spare:
                buffer.rest()

    def _upload(self, path: Path, name: str, entry: FileEntry, gives_way: Callable[[], bool]) -> str:
        if gives_way():
            raise GaveWayError
        try:
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size != entry.size:
                    raise _changed(path, entry, f"{size} bytes")
                if size <= PART or not self._is_s3:
                    return self._upload_whole(path, name, entry)
                return self._upload_parts(file, path, name, entry, gives_way)
        except OSError as error:
            raise read_error(path, error) from error

    def _upload_whole(self, path: Path, name: str, entry: FileEntry) -> str:
        if entry.size <= PART:
            with self._buffers:
                with contextlib.suppress(IndexError):
                    self._spare.pop().close()  # otherwise there would be more than `BUFFERS`
                data = read_file(path)
                checksum = xxhash.xxh3_128_hexdigest(data)
                check_source(path, entry, checksum, len(data))
                self.write(name, data)
        else:
            checksum = checksum_file(path)
            check_source(path, entry, checksum, entry.size)
            self._tried(name, "written", lambda: self._remote.opened().put_file(str(path), self._url(name)), "written")
        if not self._is_s3 and (found := self.checksum(name, entry.size)) != checksum:
            self.delete([name])
            raise CheckpointError(
                f"{self._url(name)} was written and reads back other bytes",
                found=f"checksum {found}",
                expected=f"checksum {checksum}",
                cause="the store or the network damages data",
                action="it is copied again; look at the storage",
            )
        return checksum

    def _upload_parts(self, file: Any, path: Path, name: str, entry: FileEntry, gives_way: Callable[[], bool]) -> str:
        key, part_size = self._key(name), max(PART, -(-entry.size // MOST_PARTS))
        receipts = UploadedParts(self._s3, key, with_crc32=self._compares_crc32(key))
        upload, hasher = self._tried(name, "begun", receipts.begin, verb="written"), xxhash.xxh3_128()
        sent: list[Future[dict[str, Any]]] = []

        def send(number: int, data: Buffer) -> dict[str, Any]:
            try:
                part = self._tried(name, f"written, part {number}", lambda: receipts.send(number, data), verb="written")
                self._spare.append(data)
                return part
            finally:
                self._buffers.release()

        try:
            left = entry.size
            while left:
                if gives_way():
                    raise GaveWayError
                self._buffers.acquire()
                try:
                    data = self._buffer(size := min(part_size, left))
                    if (count := data.fill(file)) < size:
                        raise _changed(path, entry, f"{entry.size - left + count} bytes")
                    hasher.update(data)
                    sent.append(self._of_requests.submit(send, len(sent) + 1, data))
                except BaseException:
                    self._buffers.release()
                    raise
                left -= size
            parts = _all(sent)
            check_source(path, entry, hasher.hexdigest(), entry.size)
            self._tried(name, "completed", lambda: self._complete(key, upload, parts, entry.size), verb="written")
        except BaseException:
            with contextlib.suppress(Exception):
                _all(sent)
            self._abort(key, upload)
            raise
        return hasher.hexdigest()

    def _buffer(self, size: int) -> Buffer:
        """A spare buffer, or a new one in its place."""
        with contextlib.suppress(IndexError):
            if len(spare := self._spare.pop()) == size:
                return spare
            spare.close()
        return Buffer(size)

    def _compares_crc32(self, key: str) -> bool:
        with self._asking:
            if self._is_compared is None:
                self._is_compared = False
                with contextlib.suppress(Exception):  # unknown, and tested again after `reopen`
                    self._is_compared = compares_crc32(functools.partial(self._ask, self._remote.impatient()), key)
            return self._is_compared

    def _complete(self, key: str, upload: str, parts: list[dict[str, Any]], size: int) -> None:
        try:
            self._s3("complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload={"Parts": parts})
        except FileNotFoundError:  # an answer was lost, so that it is retried
            if int(self._s3("head_object", Key=key)["ContentLength"]) != size:
                raise OSError("the upload is gone") from None

    def checksum(self, name: str, size: int) -> str:
        """xxh3_128 of an object, read in ranges; 32 hex digits. Raises CorpusError, SetupError."""
        hasher = xxhash.xxh3_128()
        for offset in range(0, size, PART):
            hasher.update(self._remote.read(self._url(name), offset, min(PART, size - offset)))
        return hasher.hexdigest()

    def download_all(self, files: Iterable[tuple[str, Path, FileEntry]], beat: Callable[[], object]) -> None:
        """Download files; existing ones with the right checksum are kept.

        Args:
            files: the name in the store, the file, and its size and checksum.
            beat: called whenever data has arrived.

        Raises:
            NotAsSavedError: an object is missing, or differs from what was saved.
            CheckpointError: a file cannot be written.
            SetupError: the store does not answer, or refuses.
        """
        from concurrent.futures import ThreadPoolExecutor  # only here: half of `inspect`'s import time

        # Nothing trains yet: unlike those of uploads, these threads need no low priority.
        with (
            ThreadPoolExecutor(REQUESTS, "megaresume-files") as pool,
            ThreadPoolExecutor(REQUESTS, "megaresume-ranges") as ranges,
        ):
            _all([pool.submit(self._download, *one, beat, ranges) for one in files])

    def _download(
        self, name: str, path: Path, entry: FileEntry, beat: Callable[[], object], ranges: ThreadPoolExecutor
    ) -> None:
        make_dir(path.parent)
        part = path.with_name(f"{path.name}.part")
        try:
            if path.exists():
                if path.stat().st_size == entry.size and checksum_file(path) == entry.checksum:
                    return
                path.unlink()
            for is_last in (False, True):
                found = self._fill(name, part, entry.size, beat, ranges)
                if entry.checksum in (None, found):
                    os.replace(part, path)
                    _done(part).unlink(missing_ok=True)
                    fsync_dir(path.parent)
                    return
                part.unlink()  # the wrong bytes may also come from a power cut
                _done(part).unlink(missing_ok=True)
                if is_last:
                    raise NotAsSavedError(
                        f"{self._url(name)} is not what was saved",
                        found=f"checksum {found}, read twice",
                        expected=f"checksum {entry.checksum}",
                        cause="the store or the network damages data, or somebody has written there",
                    )
        except OSError as error:
            raise write_error(part, error) from error
        except CorpusError as error:
            raise NotAsSavedError(f"{self._url(name)} is missing", found=error.found) from error

    def _fill(self, name: str, part: Path, size: int, beat: Callable[[], object], ranges: ThreadPoolExecutor) -> str:
        """Read the missing ranges, and force the file to the disk; returns its checksum, 32 hex digits.

        A file beside it records which ranges exist: one byte each, written after the range.
        """
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        marks = os.open(_done(part), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        hasher = xxhash.xxh3_128()
        #: in order; each has a buffer until it is hashed.
        coming: deque[Future[bytes | memoryview]] = deque()

        def bring(number: int) -> bytes | memoryview:
            offset = number * PART
            data: bytes | memoryview
            if done[number : number + 1] == b"x":
                data = os.pread(descriptor, min(PART, size - offset), offset)
            else:
                left = data = self._remote.view(self._url(name), offset, min(PART, size - offset))
                while left:
                    written = os.pwrite(descriptor, left, offset)
                    left, offset = left[written:], offset + written
                os.pwrite(marks, b"x", number)
            beat()
            return data

        def hash_next() -> None:
            hasher.update(coming[0].result())
            coming.popleft()
            self._buffers.release()

        try:
            os.ftruncate(descriptor, size)
            done = os.pread(marks, -(-size // PART), 0)
            for number in range(-(-size // PART)):
                # Whoever waits for a buffer must not hold one that another file needs.
                while not self._buffers.acquire(blocking=not coming):
                    hash_next()
                coming.append(ranges.submit(bring, number))
            while coming:
                hash_next()
            fsync_file(descriptor)
        finally:
            for future in coming:
                if not future.cancel():
                    future.exception()
                self._buffers.release()
            os.close(descriptor)
            os.close(marks)
        return hasher.hexdigest()

    # Threads

    def prepare(self) -> None:
        """Start every thread that may be needed until Python exits."""
        from megaresume.checkpoint.store.threads import LastingThreads, senders

        self._workers()
        senders(os.getpid())
        if (loop := getattr(self._remote.opened(), "loop", None)) is not None:
            # Resolves host names for requests.
            loop.call_soon_threadsafe(loop.set_default_executor, LastingThreads(2, "megaresume-names"))

    @property
    def _of_files(self) -> LastingThreads:
        return self._workers()[1]

    @property
    def _of_requests(self) -> LastingThreads:
        return self._workers()[2]

    def _workers(self) -> tuple[int, LastingThreads, LastingThreads]:
        from megaresume.checkpoint.store.threads import LastingThreads  # only here: half of `inspect`'s import time

        if self._pools is None or self._pools[0] != os.getpid():
            self._pools = (
                os.getpid(),
                LastingThreads(FILES, "megaresume-files"),
                LastingThreads(REQUESTS, "megaresume-parts"),
            )
        return self._pools


def _done(part: Path) -> Path:
    return part.with_name(f"{part.name}s")


def _all(futures: Iterable[Future[T]]) -> list[T]:
    """The results; or the first error, once all have finished."""
    waiting = list(futures)
    errors = [error for future in waiting if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in waiting]


def check_source(path: Path, entry: FileEntry, checksum: str, size: int) -> None:
    """Raise a ChangedSourceError if a file that was read to be copied differs from what was saved.

    Args:
        path: the file.
        entry: its size, and its checksum if the save computed one.
        checksum, size: of what was read.
    """
    if size != entry.size or (entry.checksum is not None and checksum != entry.checksum):
        raise _changed(path, entry, f"{size} bytes, checksum {checksum}")


def _changed(path: Path, entry: FileEntry, found: str) -> ChangedSourceError:
    return ChangedSourceError(
        f"{path} is not what was saved, and is not copied",
        found=found,
        expected=f"{entry.size} bytes" + (f", checksum {entry.checksum}" if entry.checksum else ""),
        cause="the local storage returns other bytes than were written, or the step is being saved again",
        action="a step that was saved again is copied then; otherwise look at the local storage",
    )
