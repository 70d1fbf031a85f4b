"""Ctrl-C, a kill, a terminal that is closed: what was started is ended, and a node that was set down comes back.

first     -> KeyboardInterrupt: whoever started something ends it on the way out
second    -> a line: that is still going on
third     -> KeyboardInterrupt, wherever it comes
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

#: The signals on which the process cleans up: by default two of them end it at once, with its children left running.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def cleaned_up() -> Iterator[None]:
    """Within it these signals are a KeyboardInterrupt, see above. One that is ignored, as by nohup, stays so."""
    told = 0

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal told
        told += 1
        if told != 2:
            raise KeyboardInterrupt
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, b"megaresume: still ending the jobs and giving back nodes; once more leaves them as they are\n")

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number, old in before.items():
            if old != signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
