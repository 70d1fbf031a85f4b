"""Range reads of an object store through fsspec (s3://, gs://, http://, memory://, ...), tried again with back-off.

How a store is reached (endpoint, credentials, region) is fsspec's own configuration: ``AWS_*`` variables,
``FSSPEC_S3_ENDPOINT_URL`` and the like, or ``~/.config/fsspec/*.json``.
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
from typing import TYPE_CHECKING, Any, TypeVar

from megaresume.stream.errors import CorpusError, MegaresumeError, SetupError

if TYPE_CHECKING:
    import tenacity

log = logging.getLogger(__name__)
T = TypeVar("T")

ATTEMPTS = 6
#: seconds before the second attempt; doubled with each, up to `LONGEST_WAIT`.
FIRST_WAIT = 0.5
LONGEST_WAIT = 20.0
#: seconds after which an attempt has failed that nobody answered.
PATIENCE = 60.0
#: seconds between two warnings of attempts that failed.
QUIET = 30.0
#: of a store's client, if its configuration says nothing else: as many connections as anybody makes requests at a time.
_OPTIONS: dict[str, dict[str, Any]] = {"s3": {"config_kwargs": {"max_pool_connections": 64}}}
#: spreads the attempts of many readers that a busy store turned away. Its own, as Python's global random numbers are
#: the training's.
_JITTER = random.SystemRandom()
#: not worth another attempt: the answer would be the same.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, ImportError, TypeError, ValueError, MegaresumeError)
#: answers of HTTP that mean: not to you.
_DENIED = (401, 403, 407)
#: and those that mean: not now.
_BUSY = (408, 425, 429)

#: fsspec's event loop at the last fork, if it runs one.
_forked: list[Any] = []


def _note_loop() -> None:
    asyn = sys.modules.get("fsspec.asyn")
    _forked[:] = [loop for loop in getattr(asyn, "loop", ()) if hasattr(loop, "_selector")]


def _leave_loop() -> None:
    """In a forked process, of an event loop that does not run there.

    Connections that it inherited are closed with the objects that hold them. The loop would take them out of the
    epoll that both processes share, and the parent would wait forever for an answer that has come.
    """
    for loop in _forked:
        loop._selector = selectors.DefaultSelector()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_note_loop, after_in_child=_leave_loop)


def is_url(path: str) -> bool:
    """Whether fsspec must read it. ``file://`` is a local path with a prefix."""
    return "://" in path and not path.startswith("file://")


def missing_library(name: str, why: str) -> SetupError:
    """For a library of the extra ``vlm``."""
    return SetupError(
        f"the library {name} is missing",
        found="it cannot be imported",
        expected=why,
        action="pip install 'megaresume[vlm]' (with s3:// 'megaresume[vlm,s3]')",
    )


def _status(error: BaseException) -> int | None:
    """What an HTTP server answered, of an error or of what it came from; None if it is of another kind."""
    seen: BaseException | None = error
    while seen is not None:
        status = getattr(seen, "status", None)
        if isinstance(status, int):
            return status
        seen = seen.__cause__ or seen.__context__
    return None


def _is_final(error: BaseException) -> bool:
    """Whether the answer would be the same."""
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


def _patience(store: Any) -> dict[str, float]:
    return {"timeout": PATIENCE} if getattr(store, "async_impl", False) else {}


class RemoteStore:
    """Files of one store. Safe to fork and to pickle: the connection is opened in the process that uses it.

    Args:
        protocol: ``s3``, ``gs``, ``memory``, ...
    """

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol
        self._opened: tuple[int, Any] | None = None
        self._failed, self._quiet_until = 0, 0.0

    def __reduce__(self) -> tuple[object, ...]:
        return (RemoteStore, (self.protocol,))

    def size(self, url: str) -> int:
        """Bytes of a file.

        Raises:
            CorpusError: no such file.
            SetupError: the store does not answer, or refuses.
        """
        return int(self.info(url)["size"])

    def info(self, url: str) -> dict[str, Any]:
        """What the store says of a file; raises as `size`."""

        def ask() -> dict[str, Any]:
            store = self._store()
            store.invalidate_cache()
            return dict(store.info(url, **_patience(store)))

        return self._tried(url, "asked for its size", ask)

    def read(self, url: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset`` on; raises as `size`."""

        def fetch() -> bytes:
            store = self._store()
            data: bytes = store.cat_file(url, start=offset, end=offset + nbytes, **_patience(store))
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

        return self._tried(url, f"read at byte {offset}", fetch)

    def read_all(self, url: str) -> bytes:
        """A whole file, held in memory; raises as `size`."""

        def fetch() -> bytes:
            store = self._store()
            # S3's client would ask for the size first, to read large files in parts.
            takes = inspect.signature(getattr(store, "_cat_file", store.cat_file)).parameters
            one_request = {"max_concurrency": 1} if "max_concurrency" in takes else {}
            return bytes(store.cat_file(url, **_patience(store), **one_request))

        return self._tried(url, "read", fetch)

    def glob(self, url: str) -> list[str]:
        """URLs of the files that a pattern matches, sorted; raises as `size`."""
        found = self._tried(url, "listed", lambda: list(self._store().glob(url)))
        return sorted(f"{self.protocol}://{path.lstrip('/')}" for path in found)

    def _store(self) -> Any:
        # A connection does not outlive a fork.
        if self._opened is None or self._opened[0] != os.getpid():
            import fsspec

            options = _OPTIONS.get(self.protocol, {})
            configured = fsspec.config.conf.get(self.protocol, {})
            options = {name: value for name, value in options.items() if name not in configured}
            self._opened = (os.getpid(), fsspec.filesystem(self.protocol, **options))
        return self._opened[1]

    def _warn(self, url: str, what: str, state: tenacity.RetryCallState) -> None:
        """Say that an attempt failed; of many, a few."""
        self._failed += 1
        if (now := time.monotonic()) < self._quiet_until:
            return
        self._quiet_until = now + QUIET
        error = state.outcome and state.outcome.exception()
        log.warning(
            "megaresume: %s could not be %s, and is tried again: %s: %s (attempt %d of %d; failures so far: %d)",
            url,
            what,
            type(error).__name__,
            error,
            state.attempt_number,
            ATTEMPTS,
            self._failed,
        )

    def _tried(self, url: str, what: str, call: Callable[[], T]) -> T:
        try:
            import fsspec  # noqa: F401 - here, so that it is named before it is tried
            import tenacity
        except ImportError as error:
            raise missing_library(error.name or "fsspec", f"it reads {url}") from error
        doubled = tenacity.wait_exponential(multiplier=FIRST_WAIT, max=LONGEST_WAIT)
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            wait=lambda state: doubled(state) * _JITTER.uniform(0.75, 1.25),
            retry=tenacity.retry_if_exception(lambda error: not _is_final(error)),
            before_sleep=lambda state: self._warn(url, what, state),
            reraise=True,
        )
        try:
            return retrying(call)
        except MegaresumeError:
            raise
        except FileNotFoundError as error:
            if _status(error) in _DENIED:  # fsspec calls it so, whatever the server said
                raise _forbidden(url, error) from error
            raise CorpusError(
                f"{url} is missing",
                found="no such file in the store",
                expected="a shard",
                cause="a wrong path or bucket, or a shard that was moved or deleted",
                action="check the path, or give the shards' new location: path in data.yaml",
            ) from error
        except ImportError as error:
            raise SetupError(
                f"{url} needs a package that is not installed",
                found=str(error),
                expected=f"the package with which fsspec reads {self.protocol}://",
                action="install it, for example: pip install 'megaresume[s3]' (s3://) or gcsfs (gs://)",
            ) from error
        except Exception as error:  # whatever the library of the store raises
            if _status(error) in _DENIED:
                raise _forbidden(url, error) from error
            final = _is_final(error)
            cause = "the store or the network is down, or too busy"
            if final:
                denied = isinstance(error, PermissionError)
                cause = "missing or wrong credentials" if denied else "a wrong address or wrong settings"
            raise SetupError(
                f"{url} cannot be read",
                found=f"{type(error).__name__}: {error}",
                expected="an answer of the store",
                cause=cause,
                action=(
                    f"{'Once' if final else f'{ATTEMPTS} times'} {what}. Check the store (endpoint, credentials) "
                    "with its own tool, then run the same command again"
                ),
            ) from error
