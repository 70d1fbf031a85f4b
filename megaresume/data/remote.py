"""Range reads from object stores through fsspec (s3://, gs://, http://, memory://, ...), retried with back-off.

Endpoint, credentials and region are fsspec's own configuration: ``AWS_*`` variables, ``FSSPEC_S3_ENDPOINT_URL`` and
the like, or ``~/.config/fsspec/*.json``.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import selectors
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from megaresume.data.s3_ranges import S3Ranges
from megaresume.data.store_counts import store_counts
from megaresume.stream.errors import CorpusError, MegaresumeError, SetupError, require

log = logging.getLogger(__name__)
T = TypeVar("T")

ATTEMPTS = 6
#: The command that installs fsspec and related packages, shown if one is missing.
INSTALL = "pip install 'megaresume[vlm]' (with s3:// 'megaresume[vlm,s3]')"
#: seconds before the second attempt; doubled for each further one, up to `LONGEST_WAIT`.
FIRST_WAIT = 0.5
LONGEST_WAIT = 20.0
#: seconds until an unanswered attempt fails.
PATIENCE = 60.0
#: least seconds between two warnings about failed attempts.
QUIET = 30.0
#: The options of a store's client, unless configured otherwise: as many connections as concurrent requests.
_OPTIONS: dict[str, dict[str, Any]] = {"s3": {"config_kwargs": {"max_pool_connections": 64}}}
#: spreads the retries of many readers that a busy store turned away. Not Python's global random numbers: they belong to
#: the training.
_JITTER = random.SystemRandom()
#: Errors not worth a retry: the answer would be the same.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, ImportError, TypeError, ValueError, MegaresumeError)
#: HTTP statuses that mean: no access.
_DENIED = (401, 403, 407)
#: HTTP statuses that mean: try later.
_BUSY = (408, 425, 429)

_CHECK = "Check the store (endpoint, credentials) with its own tool"
#: errors that s3fs turns into a PermissionError, such as wrong credentials: cause, what to do.
_NO_PERMISSION = {
    "RequestTimeTooSkewed": (
        "this machine's clock differs from the store's by more than 15 minutes",
        "Set it (timedatectl, chronyc tracking)",
    ),
    "ExpiredToken": ("the credentials have expired", "Renew them"),
}

#: fsspec's event loop at the last fork, if one was running.
_forked: list[Any] = []


def _note_loop() -> None:
    asyn = sys.modules.get("fsspec.asyn")
    _forked[:] = [loop for loop in getattr(asyn, "loop", ()) if hasattr(loop, "_selector")]


def _leave_loop() -> None:
    """In a forked process, leave the parent's event loop, which does not run there.

    Inherited connections are closed with the objects that hold them. The loop would then remove them from the epoll
    that both processes share, and the parent would wait forever for an answer that has arrived.
    """
    for loop in _forked:
        loop._selector = selectors.DefaultSelector()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_note_loop, after_in_child=_leave_loop)


def is_url(path: str) -> bool:
    """Whether fsspec must read it. ``file://`` is a local path."""
    return "://" in path and not path.startswith("file://")


def _status(error: BaseException) -> int | None:
    """The HTTP status in an error or its causes; None if there is none."""
    seen: BaseException | None = error
    while seen is not None:
        # Names of aiohttp, Azure and Google. For a torn answer, aiohttp sets a code too.
        names = ("status", "code" if type(seen).__module__.startswith("gcsfs.") else "status_code")
        for name in names:
            if isinstance(status := getattr(seen, name, None), int):
                return status
        seen = seen.__cause__ or seen.__context__
    return None


def s3_code(error: BaseException) -> str | None:
    """S3's code for an error: s3fs raises errors of other names, with Amazon's wording only for some conditions."""
    answer = getattr(error.__cause__, "response", None) or {}
    code: str | None = answer.get("Error", {}).get("Code")
    return code


def _is_final(error: BaseException) -> bool:
    """Whether a retry would get the same answer."""
    status = _status(error)
    return isinstance(error, _FINAL) or (status is not None and 400 <= status < 500 and status not in _BUSY)


def _forbidden(url: str, error: BaseException) -> SetupError:
    return SetupError(
        f"{url} is forbidden",
        found=f"HTTP status {_status(error)}",
        expected="an answer with the file",
        cause="no or wrong credentials, a signed URL that has expired, or a path that the server keeps to itself",
        action="try it outside: curl -I URL; credentials are fsspec's own configuration (~/.config/fsspec/*.json)",
    )


def _missing(url: str) -> CorpusError:
    return CorpusError(
        f"{url} is missing",
        found="no such file in the store",
        expected="a shard",
        cause="a wrong path or bucket, or a shard that was moved or deleted",
        action="check the path, or give the shards' new location: path in data.yaml",
    )


def _unanswered(url: str, what: str, verb: str, error: Exception) -> SetupError:
    is_final = _is_final(error)
    cause, remedy = "the store or the network is down, or too busy", _CHECK
    if isinstance(error, PermissionError):
        cause, remedy = _NO_PERMISSION.get(s3_code(error) or "", ("missing or wrong credentials", _CHECK))
    elif type(error).__name__ == "NoCredentialsError":  # botocore's; a machine's role may get them by the next try
        cause = "no credentials in the environment or in ~/.aws, and none from a role of this machine"
    elif is_final:
        cause = "a wrong address or wrong settings"
    return SetupError(
        f"{url} cannot be {verb}",
        found=f"{type(error).__name__}: {error}",
        expected="an answer of the store",
        cause=cause,
        action=f"{'Once' if is_final else f'{ATTEMPTS} times'} {what}. {remedy}, then run the same command again",
    )


def patience(store: Any, seconds: float | None = None) -> dict[str, float]:
    """A context in which requests of a filesystem may take this long (default `PATIENCE`), if it supports that."""
    return {"timeout": seconds or PATIENCE} if getattr(store, "async_impl", False) else {}


class RemoteStore:
    """The files of one store. Safe to fork and to pickle: each process opens its own connection.

    Args:
        protocol: ``s3``, ``gs``, ``memory``, ...
        settings: called when it is opened: more settings for S3's client than it is configured with.
    """

    def __init__(self, protocol: str, settings: Callable[[], dict[str, Any]] = dict) -> None:
        self.protocol, self._settings = protocol, settings
        self._opened: tuple[int, Any] | None = None
        #: the faster reader of ranges, and the filesystem that it replaces.
        self._ranges: tuple[Any, S3Ranges | None] = (None, None)
        self._failed, self._quiet_until = 0, 0.0

    def __reduce__(self) -> tuple[object, ...]:
        return (RemoteStore, (self.protocol, self._settings))

    def size(self, url: str) -> int:
        """Size of a file in bytes.

        Raises:
            CorpusError: no such file.
            SetupError: the store does not answer, or refuses.
        """
        return int(self.info(url)["size"])

    def info(self, url: str) -> dict[str, Any]:
        """The store's metadata of a file; raises as `size`."""

        def ask() -> dict[str, Any]:
            store = self.opened()
            store.invalidate_cache()
            return dict(store.info(url, **patience(store)))

        return self.tried(url, "asked for its size", ask)

    def read(self, url: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset`` on; raises as `size`."""
        return bytes(self.view(url, offset, nbytes).obj)  # bytes() of bytes does not copy

    def view(self, url: str, offset: int, nbytes: int) -> memoryview:
        """Read as `read` does, without copying the client's memory: copying 16 MiB costs a quarter of reading them."""
        tries = 0

        def fetch() -> memoryview:
            nonlocal tries
            tries += 1
            store = self.opened()
            ranges = self._ranges_of(store) if tries == 1 else None
            if ranges is not None:
                data = ranges.read(url, offset, nbytes)
            else:
                data = memoryview(store.cat_file(url, start=offset, end=offset + nbytes, **patience(store)))
            if len(data) > nbytes:
                raise SetupError(
                    f"{url} comes from a server that ignores ranges",
                    found=f"{len(data)} bytes, the file from its start",
                    expected=f"the {nbytes} bytes from byte {offset} on: records are read one by one",
                    cause="a simple server, as python -m http.server is, or a proxy that drops the Range header",
                    action="serve the files with one that supports Range (nginx, Apache, an object store), or copy "
                    "them here",
                )
            if len(data) != nbytes:
                raise OSError(f"{len(data)} of {nbytes} bytes came back")
            return data

        return self.tried(url, f"read at byte {offset}", fetch)

    def view_with_identity(self, url: str, offset: int, nbytes: int) -> tuple[int, str, memoryview] | None:
        """Size in bytes and ETag of the whole file, and what `view` returns, by one request without retries.

        None: it failed, or is not possible here; then `info` and `view` raise the error, or retry.
        """
        try:
            ranges = self._ranges_of(self.opened())
            found = None if ranges is None else ranges.read_with_identity(url, offset, nbytes)
        except Exception as error:  # noqa: BLE001  whatever the library of the store raises
            self._warn(url, f"read at byte {offset}", error, 1)
            return None
        return found if found is not None and found[1] and len(found[2]) == nbytes else None

    def read_all(self, url: str) -> bytes:
        """A whole file, in memory; raises as `size`."""

        return self.tried(url, "read", lambda: self.whole(url))

    def whole(self, url: str) -> bytes:
        """Read a whole file in one request, without retries. Raises what fsspec does."""
        store = self.opened()
        # S3's client would request the size first, to read large files in parts.
        takes = inspect.signature(getattr(store, "_cat_file", store.cat_file)).parameters
        one_request = {"max_concurrency": 1} if "max_concurrency" in takes else {}
        return bytes(store.cat_file(url, **patience(store), **one_request))

    def glob(self, url: str) -> list[str]:
        """URLs of the files that match a pattern, sorted; raises as `size`."""
        found = self.tried(url, "listed", lambda: list(self.opened().glob(url)))
        return sorted(f"{self.protocol}://{path.lstrip('/')}" for path in found)

    def opened(self) -> Any:
        """The filesystem of fsspec. Raises ImportError if a package that it needs is missing."""
        # A connection does not outlive a fork.
        if self._opened is None or self._opened[0] != os.getpid():
            import fsspec

            options = _OPTIONS.get(self.protocol, {})
            configured = fsspec.config.conf.get(self.protocol, {})
            options = {name: value for name, value in options.items() if name not in configured}
            if self.protocol in ("s3", "s3a") and (settings := self._settings()):
                known = options.get("config_kwargs") or configured.get("config_kwargs", {})
                options["config_kwargs"] = {**known, **settings}
            self._opened = (os.getpid(), fsspec.filesystem(self.protocol, **options))
        return self._opened[1]

    def connect(self, url: str) -> None:
        """Create S3's client before concurrent requests, which would each create one; raises as `size`."""
        self.tried(url, "asked for its size", lambda: self.opened().connect())

    def _ranges_of(self, store: Any) -> S3Ranges | None:
        """A faster reader of ranges than the filesystem, if one supports this store and works."""
        of, ranges = self._ranges
        if of is not store:
            ranges = S3Ranges.of(store)
            self._ranges = store, ranges
        return None if ranges is None or ranges.rests else ranges

    def impatient(self) -> Any:
        """The filesystem for S3, with a client that never retries by itself."""
        import fsspec

        options = {**_OPTIONS["s3"], **fsspec.config.conf.get("s3", {})}
        options["config_kwargs"] = {**options["config_kwargs"], "retries": {"total_max_attempts": 1}}
        return fsspec.filesystem("s3", skip_instance_cache=True, **options)

    def _warn(self, url: str, what: str, error: Exception, attempt: int) -> None:
        """Log a failed attempt; if many fail, only some of them."""
        self._failed += 1
        store_counts.add("retries")
        if (now := time.monotonic()) < self._quiet_until:
            return
        self._quiet_until = now + QUIET
        log.warning(
            "megaresume: %s could not be %s, and is tried again: %s: %s (attempt %d of %d; failures so far: %d)",
            url,
            what,
            type(error).__name__,
            error,
            attempt,
            ATTEMPTS,
            self._failed,
        )

    def reopen(self) -> None:
        """Reconnect at the next request, with the credentials available by then."""
        if self._opened is not None:
            type(self._opened[1]).clear_instance_cache()
            self._opened = None

    def tried(self, url: str, what: str, call: Callable[[], T], *, verb: Literal["read", "written"] = "read") -> T:
        """Make a request, with retries and back-off.

        Args:
            url: for the error.
            what: what the request does with the url: "asked for its size".
            call: the request; raises what fsspec does.
            verb: what cannot be done if it fails.

        Raises:
            CorpusError: no such file.
            SetupError: the store does not answer, or refuses.
        """
        if sys.modules.get("fsspec") is None:  # at each request, `require` would take as long as the rest
            require("fsspec", f"it reads {url}", INSTALL)
        try:
            for attempt in range(1, ATTEMPTS):
                try:
                    return call()
                except Exception as error:
                    if _is_final(error):
                        raise
                    self._warn(url, what, error, attempt)
                time.sleep(min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_WAIT) * _JITTER.uniform(0.75, 1.25))
            return call()
        except MegaresumeError:
            raise
        except ImportError as error:
            raise SetupError(
                f"{url} needs a package that is not installed",
                found=str(error),
                expected=f"the package with which fsspec reads {self.protocol}://",
                action="install it, for example: pip install 'megaresume[s3]' (s3://) or gcsfs (gs://)",
            ) from error
        except Exception as error:  # any error of the store's library
            if _status(error) in _DENIED:  # some filesystems report it as missing, whatever the server answered
                raise _forbidden(url, error) from error
            if isinstance(error, FileNotFoundError) or _status(error) == 404:
                raise _missing(url) from error
            raise _unanswered(url, what, verb, error) from error
