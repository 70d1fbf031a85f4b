"""A rank in a `Meeting`.

python meeting.py WORD...       what it does, in order

gate, end, fail, fail-for-good      of the meeting; what came of it is printed
die-after=N                         SIGKILL to itself, once the ranks have begun N times to wait
gone=RANK                           wait until that one is dead
stay                                do nothing
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import torch.distributed as dist

from megaresume.checkpoint.ending import show_refusals
from megaresume.checkpoint.meetings import FailedElsewhereError, Failure, Meeting
from megaresume.checkpoint.ranks import shared_store


def do(word: str, meeting: Meeting) -> None:
    """See above."""
    store = shared_store()
    match word.split("="):
        case ["gate"]:
            store.add("waits", 1)
            try:
                meeting.gate()
                print("passed", flush=True)
            except FailedElsewhereError as error:
                print(error.headline, flush=True)
        case ["end"]:
            store.add("waits", 1)
            print(meeting.end(), flush=True)
        case ["fail"] | ["fail-for-good"]:
            meeting.fail(Failure(words="no such file", is_final=word != "fail"))
        case ["die-after", number]:
            while store.add("waits", 0) < int(number):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        case ["gone", rank]:
            with contextlib.suppress(ProcessLookupError):
                while True:
                    os.kill(int(store.get(f"pid/{rank}")), 0)
                    time.sleep(0.01)
        case ["stay"]:
            time.sleep(600)
        case _:
            raise ValueError(word)


if __name__ == "__main__":
    show_refusals()
    dist.init_process_group("gloo")
    shared_store().set(f"pid/{dist.get_rank()}", str(os.getpid()))
    meeting = Meeting("load_checkpoint()")
    for word in sys.argv[1:]:
        do(word, meeting)
