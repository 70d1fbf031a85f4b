"""Worker processes outlive the signals that ask the run to stop.

Slurm sends a job's signals to all of its processes. torch's worker dies of a SIGTERM that is not its parent's, and
the parent of it in the middle of the very save that the signal asked for.
"""

from __future__ import annotations

import os
import signal
import threading

__all__ = ["outlive_signals"]

_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
_listening = False


def outlive_signals(_worker: int = 0) -> None:
    """In a worker process: only the parent's own SIGTERM, by which torch clears workers away, ends it.

    May be given to a ``DataLoader`` as ``worker_init_fn``. A second call in one process changes nothing.
    """
    global _listening
    if _listening:
        return
    _listening = True
    parent = os.getppid()
    # Blocked in every thread that begins from here on; delivered to the one that waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    threading.Thread(target=_wait, args=(parent,), name="megaresume-signals", daemon=True).start()


def _wait(parent: int) -> None:
    while True:
        found = signal.sigwaitinfo(_SIGNALS)
        if found.si_signo == signal.SIGTERM and found.si_pid == parent:
            os._exit(0)  # as torch's own handler does
