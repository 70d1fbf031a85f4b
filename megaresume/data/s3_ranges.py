"""Range reads from S3 by obstore, if installed: each takes a sixth of the CPU time that s3fs needs.

s3fs determines where the store is and which credentials to use:

    s3fs, opened as configured -- endpoint, region, credentials --> obstore's S3Store for each bucket

If something is configured that obstore would do differently or not at all, s3fs does the reads. A failed request is
repeated by `megaresume.data.remote` through s3fs, so all errors are those of s3fs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

#: Settings of s3fs, of its ``config_kwargs`` and of its ``client_kwargs`` that are passed on to obstore, or do not
#: matter for reads.
_KNOWN = {"key", "secret", "token", "endpoint_url", "profile", "cache_regions", "config_kwargs", "client_kwargs"}
_KNOWN_CONFIG = {
    *("max_pool_connections", "connect_timeout", "read_timeout", "retries", "region_name", "s3"),
    "http_session_cls",  # `megaresume.checkpoint.store.http_session`
}
_KNOWN_CLIENT = {"region_name", "endpoint_url"}
#: certificates that botocore reads and obstore does not.
_CERTIFICATES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
#: How long credentials that may expire are used; botocore renews them earlier.
_RENEW = timedelta(minutes=5)
#: failed requests in a row after which s3fs takes over, and for how many seconds.
FAILURES, REST = 8, 60.0

#: whether the parent had loaded obstore before the fork. Its threads are not in this process; a request would hang.
_of_parent = False
_before_fork: list[bool] = []


def _note_fork() -> None:
    _before_fork[:] = ["obstore" in sys.modules]


def _forked() -> None:
    global _of_parent
    _of_parent = _of_parent or any(_before_fork)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_note_fork, after_in_child=_forked)


class S3Ranges:
    """Reads ranges from S3 as an s3fs filesystem is configured. Safe to share between threads, in one process.

    Args:
        filesystem: of s3fs, see `of`.
    """

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem
        self._meta = filesystem.s3.meta
        self._stores: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._failed, self._rests_until = 0, 0.0

    @classmethod
    def of(cls, filesystem: Any) -> S3Ranges | None:
        """Make one for an fsspec filesystem; None if it is not s3fs's, or has settings that obstore cannot follow.

        Raises:
            Exception: what s3fs does if it cannot be connected.
        """
        if type(filesystem).__module__ != "s3fs.core" or _of_parent:
            return None
        options = {name: value for name, value in filesystem.storage_options.items() if value}
        if (
            options.keys() - _KNOWN
            or options.get("config_kwargs", {}).keys() - _KNOWN_CONFIG
            or options.get("config_kwargs", {}).get("s3", {}).keys() - {"addressing_style"}
            or options.get("client_kwargs", {}).keys() - _KNOWN_CLIENT
        ):
            return None
        try:
            import obstore  # noqa: F401
        except ImportError:
            return None
        filesystem.connect()
        secure = filesystem.s3.meta.endpoint_url.startswith("https://")
        return None if secure and any(map(os.environ.get, _CERTIFICATES)) else cls(filesystem)

    @property
    def rests(self) -> bool:
        """Whether it failed so often that s3fs should be used."""
        return self._failed >= FAILURES and time.monotonic() < self._rests_until

    def read(self, url: str, offset: int, nbytes: int) -> memoryview:
        """Bytes of an object, fewer if it is shorter.

        Raises:
            OSError: whatever failed.
        """
        import obstore

        return self._made(url, lambda store, path: obstore.get_range(store, path, start=offset, length=nbytes))

    def read_with_identity(self, url: str, offset: int, nbytes: int) -> tuple[int, str, memoryview]:
        """Size in bytes and ETag of the whole object, and the bytes of `read`, by one request; raises as `read`."""
        import obstore

        meta: dict[str, Any] = {}

        def get(store: Any, path: str) -> Any:
            answer = obstore.get(store, path, options={"range": (offset, offset + nbytes)})
            meta.update(answer.meta)
            return answer.bytes()

        data = self._made(url, get)
        return meta["size"], meta["e_tag"] or "", data

    def _made(self, url: str, request: Callable[[Any, str], Any]) -> memoryview:
        """Make a request of an object's store and path."""
        bucket, _, path = url.removeprefix("s3://").partition("/")
        try:
            data = memoryview(request(self._store(bucket), path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in obstore is not an Exception
            self._failed, self._rests_until = self._failed + 1, time.monotonic() + REST
            # Without obstore's type of error: s3fs may not agree that an object is missing.
            raise OSError(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        self._failed = 0
        return data

    def _store(self, bucket: str) -> Any:
        with self._lock:
            if bucket not in self._stores:
                from obstore.store import S3Store

                endpoint, region = self._meta.endpoint_url, self._meta.region_name or "us-east-1"
                amazon = (urlsplit(endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
                style = (self._meta.config.s3 or {}).get("addressing_style", "auto")
                virtual = style == "virtual" or (style == "auto" and amazon and "." not in bucket)
                if virtual:
                    scheme, _, host = endpoint.partition("://")
                    endpoint = f"{scheme}://{bucket}.{host}"
                self._stores[bucket] = S3Store(
                    bucket,
                    config={"endpoint": endpoint, "region": region, "virtual_hosted_style_request": virtual},
                    client_options={"timeout": "60s", "allow_http": endpoint.startswith("http://")},
                    retry_config={"max_retries": 0},
                    credential_provider=self._credentials,
                )
            return self._stores[bucket]

    def _credentials(self) -> Any:
        """Credentials as obstore asks for them, in its own thread."""
        filesystem = self._filesystem
        if filesystem.key and filesystem.secret:
            key, secret, token = filesystem.key, filesystem.secret, filesystem.token
        else:
            from fsspec.asyn import sync

            async def frozen() -> Any:
                return await (await filesystem.session.get_credentials()).get_frozen_credentials()

            key, secret, token = sync(filesystem.loop, frozen)[:3]
        expires = datetime.now(UTC) + _RENEW
        return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expires}
