"""Run by four processes, two, and one: a step that is saved by fewer ranks than before. See test_same_step.py.

same_step_toy.py DATA ROOT killed    saves step 4; in the save of step 8 all files are written, and nothing is committed
same_step_toy.py DATA ROOT fewer     goes on from step 4, saves step 8, and trains on
same_step_toy.py DATA ROOT on        goes on from what that saved
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import toy

import megaresume
import megaresume.checkpoint.saver

MODE = sys.argv[3]
STAGES = (1, 3)


def losses(engine: Any, data: Any, steps: int) -> list[float]:
    """By step: mean loss of all ranks."""
    found: list[float] = []
    while engine.global_steps < steps:
        found.append(toy.step_of(engine, data))
    return found


def dies(*args: Any, **kwargs: Any) -> None:
    raise OSError("killed here")


for stage in STAGES:
    root = toy.ROOT / f"zero{stage}"
    if not torch.distributed.is_initialized():
        toy.start()
    engine = toy.engine_of(stage=stage)
    data = megaresume.attach(engine, toy.DATA, elastic=True)
    if MODE == "killed":
        losses(engine, data, 4)
        engine.save_checkpoint(str(root))
        losses(engine, data, 8)
        commit, megaresume.checkpoint.saver.commit_save = megaresume.checkpoint.saver.commit_save, dies
        with contextlib.suppress(OSError, megaresume.MegaresumeError):
            engine.save_checkpoint(str(root))
        megaresume.checkpoint.saver.commit_save = commit
        continue
    engine.load_checkpoint(str(root))
    found: dict[str, Any] = {"line": data.resume.line()}
    if MODE == "fewer":
        losses(engine, data, 8)
        engine.save_checkpoint(str(root))
    found["losses"] = losses(engine, data, 12)
    toy.result(f"zero{stage}", found)
if MODE == "killed":
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
toy.finish()
