"""What the ranks of a job do together, as far as one process can tell."""

from __future__ import annotations

import ctypes
import hashlib
import threading

from megaresume.session import ranks


def test_a_process_ends_after_gloos_threads_are_done() -> None:
    """A thread of that name that is busy without Python, as one is that the machine has no core for."""
    began, done = threading.Event(), []

    def drop() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)  # PR_SET_NAME
        content = b"0" * 2**28
        began.set()
        done.append(hashlib.sha256(content).digest())

    thread = threading.Thread(target=drop)
    thread.start()
    assert began.wait(60)
    ranks._wait_for_gloo(patience_seconds=60)
    assert done
    thread.join()
