"""What the fuzzer is pointed at."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

__all__ = ["Target", "scratch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One kind of file.

    Args:
        seeds: intact files, or files that are odd in an interesting way.
        check: reads one, and raises (anything) where the reader does what it must not: raise an error that is not
            ours, or accept what was not written.
        mutate: another file of the same form; None: this one has none. Without it the fuzzer changes bytes only.
    """

    seeds: Callable[[], Sequence[bytes]]
    check: Callable[[bytes], None]
    mutate: Callable[[bytes, Random], bytes | None] | None = None


@functools.cache
def scratch() -> Path:
    """A directory of this process, in memory where the machine has it."""
    memory = Path("/dev/shm")
    directory = tempfile.mkdtemp(prefix="megaresume-fuzz-", dir=memory if os.access(memory, os.W_OK) else None)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)
