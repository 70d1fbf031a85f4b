"""What the ranks of a job do together, as far as one process can tell."""

from __future__ import annotations

import ctypes
import hashlib
import threading

from megaresume.session import ranks


def test_of_long_texts_what_differs_is_shown() -> None:
    before = ", ".join(f"'source_{k}': {{'seed': {k}}}" for k in range(100))
    one, other = (f"{before}, 'source_{last}': {{}}, {before}" for last in (7, 8))
    shown = ranks._around_difference(one, other)
    assert all("'source_99'" in text and len(text) < 140 for text in shown)
    assert "'source_7': {}" in shown[0] and "'source_8': {}" in shown[1]
    assert ranks._around_difference("1e5", "2e5") == ("1e5", "2e5")
    assert ranks._around_difference(one, one + "!")[1].endswith("! ...")


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
