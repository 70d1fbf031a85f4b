"""`Objects`: the small objects of a checkpoint root in an object store, through fsspec; only the requests needed.

    sizes          names and sizes below a prefix, from all pages of the answer
    read           a small object
    write          a small object, atomically
    create         the same, unless it exists: if two try, one succeeds (`If-None-Match`, or the store's equivalent)
    delete         objects
    abort_uploads  the parts of uploads left by a kill

Errors that may pass are retried with back-off, as for reads of data (`megaresume.data.remote`), where the access to a
store is described too.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

from megaresume.checkpoint.store.receipts import OtherBytesError, send_with_md5
from megaresume.data.remote import PATIENCE, RemoteStore, patience, s3_code
from megaresume.stream.errors import CheckpointError, CorpusError, SetupError

T = TypeVar("T")


class NotAsSavedError(CheckpointError):
    """Raised if an object is missing, or has other bytes than were saved."""


#: seconds that a request with a part may take.
SENT_WITHIN = 600.0
#: seconds for a last request while a program exits.
AT_THE_END = 10.0
#: objects that S3 deletes in one request.
_DELETED_AT_ONCE = 1000


def is_store(place: str | os.PathLike[str]) -> bool:
    """Whether this is a URL of an object store. ``file://`` is a directory."""
    return "://" in os.fspath(place) and not os.fspath(place).startswith("file://")


class Objects:
    """The objects of a root. Safe to use from several threads.

    Args:
        url: ``s3://bucket/run``: names are relative to it.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        protocol, _, path = self.url.partition("://")
        self._path = path
        self._bucket, _, self._prefix = path.partition("/")
        self._is_s3 = protocol in ("s3", "s3a")
        self._remote = RemoteStore(protocol, _settings)

    def __str__(self) -> str:
        return self.url

    def reopen(self) -> None:
        """Reconnect, with the credentials available now."""
        self._remote.reopen()

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of every object whose name begins with ``prefix`` (a folder: ends with a slash, or empty), by name.

        Raises:
            SetupError: the store does not answer or refuses, or there is no such bucket.
        """
        pages = self._pages if self._is_s3 else self._found
        return self._tried(prefix, "listed", lambda: dict(pages(prefix)))

    def _pages(self, prefix: str) -> Iterator[tuple[str, int]]:
        before = f"{self._prefix}/" if self._prefix else ""
        more: dict[str, Any] = {}
        while True:
            page = self._s3("list_objects_v2", Prefix=before + prefix, **more)
            for one in page.get("Contents", ()):
                yield one["Key"].removeprefix(before), int(one["Size"])
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _found(self, prefix: str) -> Iterator[tuple[str, int]]:
        files = self._remote.opened()
        files.invalidate_cache()
        top = files._strip_protocol(self.url)
        with contextlib.suppress(FileNotFoundError):
            found = files.find(f"{self.url}/{prefix}".rstrip("/"), detail=True, **patience(files))
            for path, info in found.items():
                name = path.removeprefix(top).lstrip("/")
                if name.startswith(prefix):
                    yield name, int(info["size"])

    def read(self, name: str) -> bytes | None:
        """The content of a small object; None if it does not exist. Raises SetupError; NotAsSavedError if damaged."""

        def get() -> bytes | None:
            try:
                return self._remote.whole(self._url(name))
            except FileNotFoundError as error:
                self._check_bucket(error)
                return None

        try:
            return self._tried(name, "read", get)
        except SetupError as error:
            if type(error.__cause__).__name__ != "FlexibleChecksumError":  # botocore's, which not every store needs
                raise
            raise NotAsSavedError(
                f"{self._url(name)} is not what was saved",
                found=str(error.__cause__),
                expected="an object as it was written",
                cause="the store or the network damages data",
                action="start again; if it fails again, compare what another client reads, such as aws s3 cp",
            ) from error

    def write(self, name: str, data: bytes) -> None:
        """Write a small object, replacing any. Raises SetupError."""
        self._tried(name, "written", lambda: self._put(name, data), verb="written")

    def try_write(self, name: str, data: bytes) -> None:
        """Like `write`, but tried once, for a program that exits: it must not wait for a store that does not answer."""
        with contextlib.suppress(Exception):
            try:
                self._put(name, data, seconds=AT_THE_END)
            except OtherBytesError:  # or the wrong bytes would stay there
                self._put(name, data, seconds=AT_THE_END)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small object, unless it exists.

        Returns:
            whether the object now has this content. Processes that try at once must not write the same bytes.

        Raises:
            SetupError: the store does not answer, or refuses.
        """
        if self.creates(name, data):
            return True
        # If a store's answer was lost, the retry is refused because the object exists already.
        return self.read(name) == data

    def creates(self, name: str, data: bytes) -> bool:
        """Like `create`; but False for an existing object with the same bytes. Without conditional writes, True."""

        def attempt() -> bool:
            try:
                self._put(name, data, is_new=True)
            except FileExistsError:
                return False
            return True

        return self._tried(name, "created", attempt, verb="written")

    def _put(self, name: str, data: bytes, *, is_new: bool = False, seconds: float | None = None) -> None:
        if self._is_s3:
            condition = {"IfNoneMatch": "*"} if is_new else {}
            try:
                send_with_md5(self._s3, "put_object", data, Key=self._key(name), seconds=seconds, **condition)
            except OtherBytesError:
                if is_new:  # otherwise nobody could ever create it
                    self._s3("delete_object", Key=self._key(name))
                raise
            except OSError as error:
                if is_new and s3_code(error) == "PreconditionFailed":
                    raise FileExistsError(self._url(name)) from error
                raise
            return
        files, url = self._remote.opened(), self._url(name)
        how = self._condition() if is_new else {}
        if how is None and files.exists(url, **patience(files, seconds)):
            raise FileExistsError(url)
        files.pipe_file(url, data, **(how or {}), **patience(files, seconds))

    def _condition(self) -> dict[str, Any] | None:
        """The parameters by which fsspec only writes an object that does not exist; None: this filesystem has none."""
        files = self._remote.opened()
        takes = inspect.signature(getattr(files, "_pipe_file", files.pipe_file)).parameters
        conditions: dict[str, Any] = {"mode": "create", "overwrite": False}
        return next(({name: value} for name, value in conditions.items() if name in takes), None)

    @property
    def is_conditional(self) -> bool:
        """Whether the store accepts conditional writes; some then ignore the condition."""
        return self._is_s3 or self._condition() is not None

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; no error if they do not exist. Raises SetupError."""
        doomed = list(names)
        for first in range(0, len(doomed), _DELETED_AT_ONCE):
            some = doomed[first : first + _DELETED_AT_ONCE]
            self._tried(some[0], "deleted", lambda: self._delete(some), verb="written")  # noqa: B023  runs here

    def _delete(self, names: Sequence[str]) -> None:
        if self._is_s3:
            keys = [{"Key": self._key(name)} for name in names]
            answer = self._s3("delete_objects", Delete={"Objects": keys, "Quiet": True})
            if failed := answer.get("Errors"):
                raise OSError(f"{failed[0].get('Key')}: {failed[0].get('Code')} {failed[0].get('Message')}")
            return
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                files = self._remote.opened()
                files.rm_file(self._url(name), **patience(files))

    def abort_uploads(self, names: re.Pattern[str]) -> None:
        """Abort unfinished uploads in parts: those of a killed process take space.

        Args:
            names: of the objects. Another run, or a user's program, may upload to a folder below this one.
        """
        if not self._is_s3:
            return
        prefix, more = f"{self._prefix}/" if self._prefix else "", dict[str, Any]()
        with contextlib.suppress(SetupError, CorpusError):
            while True:
                page = self._tried(
                    "",
                    "listed",
                    lambda: self._s3("list_multipart_uploads", Prefix=prefix, **more),  # noqa: B023
                )
                for one in page.get("Uploads", ()):
                    if names.fullmatch(one["Key"].removeprefix(prefix)):
                        self._abort(one["Key"], one["UploadId"])
                if not page.get("IsTruncated"):
                    break
                more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _abort(self, key: str, upload: str) -> None:
        with contextlib.suppress(Exception):  # the next start retries, and a rule of the bucket can do it
            self._s3("abort_multipart_upload", Key=key, UploadId=upload)

    # How

    def _url(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _s3(self, method: str, **parameters: Any) -> Any:
        return self._ask(self._remote.opened(), method, **parameters)

    def _ask(self, client: Any, method: str, *, seconds: float | None = None, **parameters: Any) -> Any:
        seconds = seconds or (SENT_WITHIN if "Body" in parameters else PATIENCE)
        return client.call_s3(method, Bucket=self._bucket, timeout=seconds, **parameters)

    def _tried(self, name: str, what: str, call: Callable[[], T], verb: Literal["read", "written"] = "read") -> T:
        try:
            return self._remote.tried(self._url(name), what, call, verb=verb)
        except CorpusError as error:
            raise SetupError(
                f"{self._url(name)} cannot be {verb}: the store does not know it",
                found=f"{what}: {error.__cause__}",
                expected="a bucket that is there",
                cause="a wrong name of the bucket, the endpoint of another store, or an upload that was aborted",
                action="correct the URL, or make the bucket with the store's own tool",
            ) from error

    def _check_bucket(self, error: FileNotFoundError) -> None:
        """Raise if it is the bucket that does not exist."""
        if self._is_s3 and "bucket" in str(error).lower():
            raise error


def _settings() -> dict[str, Any]:
    """Settings for S3's client."""
    from megaresume.checkpoint.store.http_session import HttpSession

    return {"http_session_cls": HttpSession}
