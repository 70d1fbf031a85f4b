"""`Scratch`: a temporary directory for the mirror of a store, which the next start removes if a kill left it.

$TMPDIR/megaresume-store-x1y2/        the directory
$TMPDIR/megaresume-store-x1y2.lock    locked while it is in use: the kernel releases it with the process
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX, _SUFFIX = "megaresume-store-", ".lock"


class Scratch:
    """Creates a temporary directory, after removing those of killed processes; removed at exit, or by `close`.

    Raises:
        OSError: $TMPDIR is full.
    """

    def __init__(self) -> None:
        _remove_left()
        while True:
            self._lock, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.fstat(self._lock).st_nlink:
                break
            os.close(self._lock)  # another start, in between the two calls, took it for a leftover
        self.path = Path(name.removesuffix(_SUFFIX))
        self.path.mkdir(mode=0o700)
        self._process: int | None = os.getpid()
        atexit.register(self.close)

    def close(self) -> None:
        """Remove it, in the process that created it."""
        if self._process == os.getpid():
            self._process = None
            atexit.unregister(self.close)
            _remove(self.path)
            os.close(self._lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_left() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*{_SUFFIX}"):
        with contextlib.suppress(OSError):  # in use, or another user's
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(lock.with_suffix(""))
            finally:
                os.close(descriptor)


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    if not directory.exists():
        directory.with_name(directory.name + _SUFFIX).unlink(missing_ok=True)
