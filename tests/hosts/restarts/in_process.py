"""A loop under NVIDIA's resiliency extension, whose Wrapper calls it again in the same processes after a fault.

    torchrun --nproc-per-node 2 in_process.py DIRECTORY JSON-OPTIONS

Its abort knows NCCL alone: under gloo a rank that waits for one that has failed goes on waiting until its own timeout,
which is short here. Each call needs a process group of its own, so of a store of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import nvidia_resiliency_ext.inprocess as inprocess
import torch.distributed as dist

from tests.hosts.restarts import program


class Fault(RuntimeError):
    """What a rank dies of, in a loop that is called again."""


def main(directory: Path, *, faults: list[tuple[int, int, str]], **options: Any) -> None:
    """Train.

    Args:
        directory: see `program`.
        faults: of each call but the last: rank, step, and where: ``step``, after it was made and written down, or
            ``save``, in the middle of a save.
        options: of the program.
    """
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    calls = itertools.count()
    base = dist.TCPStore("127.0.0.1", port + 7, is_master=rank == 0, wait_for_workers=False)

    @inprocess.Wrapper(
        initialize=inprocess.initialize.RetryController(max_iterations=len(faults) + 2),
        monitor_thread_interval=timedelta(seconds=0.2),
        monitor_process_interval=timedelta(seconds=0.2),
        heartbeat_timeout=timedelta(seconds=60),
    )
    def train() -> None:
        call = next(calls)
        where = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        dist.init_process_group("gloo", store=dist.PrefixStore(str(call), base), timeout=timedelta(seconds=15), **where)
        fault = faults[call] if call < len(faults) else None

        def fail(step: int, happens: str) -> None:
            if fault is not None and fault == (dist.get_rank(), step, happens):
                raise Fault(f"in step {step}")

        program.loop(directory, fail=fail, **options)
        dist.destroy_process_group()

    train()


if __name__ == "__main__":
    asked = json.loads(sys.argv[2])
    main(Path(sys.argv[1]), **asked | {"faults": [tuple(fault) for fault in asked["faults"]]})
