"""One rank of an upstream run: logs what the model is fed, ends itself in the middle of a step if asked to.

    torchrun … worker.py -m megaresume.run pretrain_gpt.py ARGS      through the launcher
    torchrun … worker.py pretrain_gpt.py ARGS                        as it is

It knows nothing of megaresume. What is read from a DataLoader is what `get_batch` gets: the tokens of every row are
hashed, with the count of trained samples that Megatron itself has at that moment.

    UPSTREAM_LOG    folder: rank R appends to batches-R.jsonl {"consumed", "dp", "loader", "rows"}
    UPSTREAM_KILL   RANK:CONSUMED:MICRO  SIGKILL to this rank when it has read that micro-batch (from 0) of that step
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

#: the modules of Megatron-LM and of Megatron-DeepSpeed that hold the arguments.
GLOBAL_VARS = ("megatron.training.global_vars", "megatron.global_vars")
#: keys of a batch, in the order in which they are looked for.
TOKENS = ("text", "tokens")


def consumed() -> int:
    """``args.consumed_train_samples`` of whichever Megatron this is."""
    for name in GLOBAL_VARS:
        if name in sys.modules:
            return int(sys.modules[name].get_args().consumed_train_samples)
    return -1


def dp_rank() -> int:
    """The data-parallel rank of this process, by whichever Megatron this is."""
    for name in ("megatron.core.parallel_state", "megatron.mpu.initialize"):
        if name in sys.modules:
            return int(sys.modules[name].get_data_parallel_rank())
    return -1


def rows(batch: Any) -> list[str]:
    """A hash for every row of a batch: of the tokens, and of the labels where they are given apart."""
    key = next(key for key in TOKENS if key in batch)
    parts = [batch[key], *([batch["labels"]] if "labels" in batch else [])]
    tables = [torch.as_tensor(part).to(torch.int64).numpy() for part in parts]
    return [
        hashlib.sha256(b"|".join(table[row].tobytes() for table in tables)).hexdigest()[:16]
        for row in range(len(tables[0]))
    ]


def log_batches(directory: Path, rank: int, kill: str | None) -> None:
    """Write down every batch that this process takes from a loader, from now on."""
    log = open(directory / f"batches-{rank}.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
    loaders = iter(range(1 << 30))
    seen: Counter[int] = Counter()
    plain_init, plain_next = _BaseDataLoaderIter.__init__, _BaseDataLoaderIter.__next__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self._upstream_number = next(loaders)
        plain_init(self, *args, **kwargs)

    def next_batch(self: Any) -> Any:
        batch = plain_next(self)
        now = consumed()
        entry = {"consumed": now, "dp": dp_rank(), "loader": self._upstream_number, "rows": rows(batch)}
        log.write(json.dumps(entry) + "\n")
        if self._upstream_number == 0:
            if kill == f"{rank}:{now}:{seen[now]}":
                os.kill(os.getpid(), signal.SIGKILL)
            seen[now] += 1
        return batch

    _BaseDataLoaderIter.__init__, _BaseDataLoaderIter.__next__ = init, next_batch


def main() -> None:
    """Run what the command line names, as torchrun would have run it."""
    torch.set_num_threads(1)
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        import deepspeed

        # It would be compiled at the first init_distributed; a build that was killed hangs every later run.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if directory := os.environ.get("UPSTREAM_LOG"):
        log_batches(Path(directory), int(os.environ["RANK"]), os.environ.get("UPSTREAM_KILL"))
    # In the place of this file's folder: what `python -m` and `python SCRIPT` put there.
    try:
        if sys.argv[1] == "-m":
            sys.path[0] = os.getcwd()
            sys.argv = sys.argv[2:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = sys.argv[1:]
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:  # the launcher's way to end, also when all is well
        if end.code not in (None, 0):
            raise
    # Threads of a group that is left standing now and then abort a process that has done all of its work.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
