"""Run by two processes: a long piece of work on rank 0, in a group whose collectives wait for three seconds only."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable

import torch.distributed as dist

from megaresume.checkpoint.ranks import on_rank_0_for_long
from megaresume.stream.errors import SetupError

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# Two processes may begin further apart than the patience of the group.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=3))


def work(beat: Callable[[], None]) -> str:
    for _ in range(50):
        beat()
        time.sleep(0.1)
    return "done"


def fail(beat: Callable[[], None]) -> None:
    raise SetupError("the disk is full")


began = time.monotonic()
value = on_rank_0_for_long(work, "worked")
enough = time.monotonic() - began >= 4.9
error: SetupError | None = None
try:
    on_rank_0_for_long(fail, "failed")
except SetupError as problem:
    error = problem
print(f"RANK {dist.get_rank()} {value} after at least 5 s: {enough} | SetupError: {error}", flush=True)
dist.destroy_process_group()
