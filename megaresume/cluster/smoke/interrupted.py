"""On Ctrl-C, a kill or a closed terminal, ends what was started, and brings back a node that was set down.

first     -> KeyboardInterrupt: everything started is ended on the way out
second    -> a line that says that this is in progress
third     -> KeyboardInterrupt, immediately
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

#: Signals on which the process cleans up: by default, two of them end it at once and leave its children running.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def cleaned_up() -> Iterator[None]:
    """A context in which these signals raise KeyboardInterrupt, see above; ignored ones (nohup) stay ignored."""
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
