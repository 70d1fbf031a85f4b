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


#: names the directory that the parent of a fuzzed process made, and clears away: such a process ends without a word.
SCRATCH = "MEGARESUME_FUZZ_SCRATCH"


@functools.cache
def scratch() -> Path:
    """A directory of this process, in memory where the machine has it."""
    if SCRATCH in os.environ:
        return Path(os.environ[SCRATCH])
    directory = tempfile.mkdtemp(prefix="megaresume-fuzz-", dir=in_memory())
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def in_memory() -> Path | None:
    """Where files cost least; None: where temporary ones usually are."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else None
