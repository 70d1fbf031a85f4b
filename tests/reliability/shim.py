"""The shim that counts file operations and stops a process at one of them: built, preloaded and spoken to from here.

environment()      variables for a process that shall have it      (LD_PRELOAD, before it starts)
Shim().arm(...)    in that process or a child of it                (inert before)
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

SOURCE = Path(__file__).with_name("shim.c")

#: kill: SIGKILL in place of the operation. half: only writes are counted; half of it, then SIGKILL.
#: full: from there on everything that takes space fails. read_only: everything that changes a name does.
#: record: nothing stops; every operation is written down (`recording`).
Mode = Literal["count", "kill", "half", "full", "read_only", "record"]
MODES: Final[tuple[Mode, ...]] = ("count", "kill", "half", "full", "read_only", "record")


def compiler() -> str:
    """A C compiler.

    Raises:
        RuntimeError: there is none.
    """
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise RuntimeError("these tests need a C compiler: apt-get install gcc, or dnf install gcc")
    return found


@functools.cache
def build() -> Path:
    """Compile the shim, once for every version of its source; processes may do so at the same time.

    Raises:
        RuntimeError: there is no C compiler.
    """
    name = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    target = Path(tempfile.gettempdir(), f"megaresume-shim-{os.getuid()}-{name}.so")
    if not target.exists():
        own = target.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler(), "-O1", "-shared", "-fPIC", "-o", own, SOURCE, "-ldl"], check=True)
        own.rename(target)
    return target


def environment() -> dict[str, str]:
    """For the process in which `Shim` shall work."""
    return {"LD_PRELOAD": str(build())}


class Shim:
    """The shim of this process, which must have been started with `environment`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(build()))
        self._library.shim_arm.argtypes = [ctypes.c_char_p, *[ctypes.c_long] * 3, ctypes.c_int]
        self._library.shim_disarm.restype = ctypes.c_long

    def arm(self, directory: Path, *, at: int = 0, mode: Mode = "count", error: int = 0, log: int = -1) -> None:
        """From now on, count the operations below a directory, and stop at one.

        Args:
            directory: absolute.
            at: number of the operation, from 1.
            mode: what happens there.
            error: ``errno`` of the modes in which operations fail.
            log: descriptor that gets a line for each operation, before it is done; -1: none. In mode "record" what
                `recording` reads; processes that record together share it, each opened for appending.
        """
        self._library.shim_arm(os.fsencode(directory), at, MODES.index(mode), error, log)

    def disarm(self) -> int:
        """Stop counting; returns how many operations there were."""
        return int(self._library.shim_disarm())

    @contextmanager
    def armed(
        self, directory: Path, *, at: int = 0, mode: Mode = "count", error: int = 0, log: int = -1
    ) -> Iterator[None]:
        """`arm` for a while."""
        self.arm(directory, at=at, mode=mode, error=error, log=log)
        try:
            yield
        finally:
            self.disarm()
