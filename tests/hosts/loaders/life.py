"""One life of a training run under DeepSpeed with Energon's loader: train, log, save, be killed. By two processes.

    life.py SHARDS ROOT SAVE STOP [save=3,4] [kill=save|step]

Every batch that was trained goes into ``<ROOT>/<SAVE>.<rank>.jsonl`` as [step, what it held], at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import kit  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import toy  # noqa: E402

import megaresume  # noqa: E402
from megaresume.checkpoint import saver  # noqa: E402

name, stop = sys.argv[3], int(sys.argv[4])
options = dict(word.split("=") for word in sys.argv[5:])
save_at = [int(step) for step in options.get("save", "").split(",") if step]

toy.start()
rank = dist.get_rank()
save = toy.ROOT / name
engine = toy.engine_of(micro=2, batch=4)
data = megaresume.attach(
    engine,
    kit.energon_loader(toy.DATA, rank=rank, world=2, workers=2, every=60),
    checkpoints=megaresume.Checkpoints(save_dir=save),
)
if "load" in options:
    engine.load_checkpoint(str(save))


def killed(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


with open(toy.ROOT / f"{name}.{rank}.jsonl", "a") as log:
    pending: list[Any] = []
    tokens = torch.arange(32).reshape(2, 16)
    while engine.global_steps < stop:
        held = pending.pop() if pending else kit.seen(next(data))
        loss = engine(tokens).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        print(json.dumps([engine.global_steps, held]), file=log, flush=True)
        if engine.global_steps in save_at:
            if options.get("kill") == "save" and engine.global_steps == stop:
                saver.commit_save = killed  # rank 0 dies between the files of all ranks and the commit
            if options.get("ahead"):
                pending.append(kit.seen(next(data)))  # a loop that reads ahead: handed out, and not trained
            engine.save_checkpoint(str(save))
dist.barrier()
if "kill" in options:
    killed()
toy.result("resume", None if data.resume is None else data.resume.line())
os._exit(0)  # Energon's threads and workers are of no interest any more
