"""A loop in plain torch over packed text, run by the tests of figures in processes of its own.

    python program.py JSON        in the environment of torchrun, if there are several ranks

Tokens say by themselves what they are, so that what was trained can be counted without megaresume: source k has the
tokens from 1000 k on; 1 begins a document, 2 ends it, 0 is padding. Each rank writes down what it trained.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megaresume
from megaresume import BatchSchedule, Checkpoints, StreamLoader, open_stream


class Slow(StreamLoader):
    """Every fifth micro-batch comes late."""

    late = 0.0

    def __iter__(self) -> Any:
        for k, batch in enumerate(super().__iter__()):
            time.sleep(0 if k % 5 else self.late)
            yield batch


class SlowState:
    """What takes its time to be saved."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def state_dict(self) -> dict[str, Any]:
        time.sleep(self.seconds)
        return {"seconds": torch.tensor(self.seconds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to put back."""


class Truth:
    """What the time of this process was spent on, as its own clock says, written down as it happens."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def note(self, what: str, begin: float) -> float:
        """The time since ``begin`` was for this; now."""
        now = time.time()
        self._file.write(json.dumps([what, begin, now]) + "\n")
        self._file.flush()
        return now


def born() -> float:
    """When this process began, by the kernel, which counts in hundredths of a second from when the machine did."""
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - began)


def main(job: dict[str, Any]) -> None:
    """Train to ``until`` steps, or to a SIGKILL: after ``kill`` steps, or right after the checkpoint of a step."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    directory = Path(job["directory"])
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = open_stream(job["data"], on_change="stage")
    Slow.late = job.get("late", 0.0)
    loader = Slow(stream, BatchSchedule.constant(8), micro_batch_size=job.get("micro", 2), prefetch=0)
    loop = megaresume.attach(
        {"model": model, "optimizer": optimizer, "slow": SlowState(job.get("slow_save", 0.0))},
        loader,
        checkpoints=Checkpoints(save_dir=directory / "run"),
        metrics=job.get("metrics", "jsonl every=0.05"),
    )
    loop.load()
    truth = Truth(directory / f"truth.{job['attempt']}.{rank}")
    record = (directory / f"trained.{job['attempt']}.{rank}").open("a")
    now = truth.note("startup", born())
    waited_for = "first"
    for batch in loop:
        now = truth.note(waited_for, now)
        waited_for = "data"
        if job.get("losses"):
            loop.meter.losses(batch, losses_of(batch["tokens"]))
        model(batch["tokens"][:, :2].float()).sum().backward()
        # What each micro-batch holds, before anybody could say that it is trained.
        masks = batch["loss_mask"].int().tolist()
        bounds = [row.tolist() for row in batch["cu_seqlens"]]
        record.write(json.dumps([loop.step + 1, batch["tokens"].tolist(), masks, bounds]) + "\n")
        record.flush()
        if is_last := loop.ends_step:
            optimizer.step()
            optimizer.zero_grad()
            loop.stepped()
            time.sleep(job.get("pause", 0.0))
            if loop.step == job.get("kill"):
                time.sleep(job.get("before_kill", 0.0))
                truth.note("steps", now)
                os.kill(os.getpid(), signal.SIGKILL)
        now = truth.note("steps", now)
        if is_last and loop.step % job.get("save_every", 5) == 0:
            if loop.step == job.get("kill_after_commit"):
                loop.meter.saved = lambda step, samples: die_when_counted(directory, samples)
            loop.save()
            now = truth.note("saving", now)
        if is_last and loop.step == job["until"]:
            break
    loop.finish()


def die_when_counted(directory: Path, samples: int) -> None:
    """Once the record says what was counted; the checkpoint is complete by now, and its own mark is not written."""
    while not any(
        json.loads(line)["event"] == "counts" and json.loads(line)["samples"] == samples
        for line in (directory / "run/megaresume/meter/run.jsonl").read_text().splitlines()
    ):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def losses_of(tokens: torch.Tensor) -> torch.Tensor:
    """A loss for every token, which anybody can compute again: float32[m, S]."""
    return ((tokens % 97).float() / 97) ** 2 + 0.01


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]))
