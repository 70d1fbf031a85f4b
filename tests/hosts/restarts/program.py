"""What a loop trains while its workers are started again in place, written down by its ranks.

    torchrun --nnodes 1:2 ... program.py DIRECTORY JSON-OPTIONS

The recorder is the model: its forward is given items, and each rank appends what went into a step once the
optimizer has made it. It shares no code with megaresume. ``judge`` reads it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megaresume

#: items of the data; samples of a step, whatever the ranks; samples of a micro-batch of a rank.
ITEMS, GLOBAL, BATCH = 60, 8, 2


class Model(torch.nn.Module):
    """Of one parameter; remembers the items that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        self.given: list[list[int]] = []

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        self.given.append([int(item) for item in items.flatten()])
        loss: torch.Tensor = (self.line(items / ITEMS) - 1).square().mean()
        return loss


class Recorder:
    """Appends a line for each step that this rank has made.

    Args:
        directory: of the lines, one file a process.
        model: that is asked what it was given.
        seconds: that a step takes.
    """

    def __init__(self, directory: Path, model: Model, seconds: float) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.model, self.seconds = model, seconds
        # The number of this group of workers: of rank 0, the same on all of them.
        self.launch = torch.tensor([time.time_ns()])
        dist.broadcast(self.launch, 0)
        self.path = directory / f"rank_{self.rank}_{os.getpid()}.jsonl"

    def made(self, step: int) -> None:
        """The optimizer has made this step."""
        line = {"step": step, "rank": self.rank, "ranks": self.ranks, "launch": int(self.launch)}
        line |= {"micro": self.model.given, "line": [float(p.detach()) for p in self.model.line.parameters()]}
        self.model.given = []
        with self.path.open("a") as out:
            out.write(json.dumps(line) + "\n")
        time.sleep(self.seconds)


def nothing(step: int, happens: str) -> None:
    """What may happen after each ``step``, and in each ``save``."""


def loop(
    directory: Path, steps: int, save_every: int, seconds: float, fail: Callable[[int, str], None] = nothing
) -> None:
    """A loop in plain torch."""
    torch.manual_seed(1)
    model = Model()
    recorder = Recorder(directory / "record", model, seconds)
    trained = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    accumulation = GLOBAL // (BATCH * recorder.ranks)
    data = torch.arange(ITEMS, dtype=torch.float32)[:, None]
    loader = megaresume.DataLoader(data, batch_size=BATCH, accumulation=accumulation, seed=3)
    checkpoints = megaresume.Checkpoints(save_dir=directory / "run", max_starts=0)

    class Fails:
        """Of the checkpoint, without a state."""

        def state_dict(self) -> dict[str, Any]:
            fail(loop.step, "save")
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            return

    objects = {"model": trained, "optimizer": optimizer, "fails": Fails()}
    loop = megaresume.attach(objects, loader, checkpoints=checkpoints)
    loop.load()
    while loop.step < steps:
        for batch in loop:
            with contextlib.nullcontext() if loop.ends_step else trained.no_sync():
                (trained(batch) / accumulation).backward()
            if not loop.ends_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            loop.stepped()
            recorder.made(loop.step)
            fail(loop.step, "step")
            if loop.step % save_every == 0:
                loop.save()
            if loop.step == steps:
                break
    loop.finish()


def main(directory: Path, *, steps: int, save_every: int = 3, seconds: float = 0.0) -> None:
    """Train."""
    dist.init_process_group("gloo")
    loop(directory, steps, save_every, seconds)
    dist.destroy_process_group()


def lines_of(directory: Path) -> list[Any]:
    """Of the record, so far; a last one that is being written is left out."""
    texts = [path.read_text() for path in (directory / "record").glob("*.jsonl")]
    return [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]


def newest_step(lines: list[Any], ranks: int) -> int:
    """That the newest group of workers has made, if there are so many of them; else 0."""
    last = max((line["launch"] for line in lines), default=0)
    return max((line["step"] for line in lines if line["launch"] == last and line["ranks"] == ranks), default=0)


@dataclass(frozen=True)
class Record:
    """What the weights of a run have gone through."""

    #: by step, from 1: its items in the order of the stream; ranks that made it; values of the parameters after it.
    steps: dict[int, list[int]]
    ranks: dict[int, int]
    weights: dict[int, list[float]]
    #: steps that were made and given up: of those that nobody had saved.
    again: int


def judge(directory: Path) -> Record:
    """Of each step the group of workers that made it last. Its ranks have made it together, and hold the same weights;
    whatever group made it, from the same items."""
    lines = [json.loads(line) for path in (directory / "record").iterdir() for line in path.read_text().splitlines()]
    steps: dict[int, list[int]] = {}
    ranks: dict[int, int] = {}
    weights: dict[int, list[float]] = {}
    again = 0
    for step in range(1, max(line["step"] for line in lines) + 1):
        launches: dict[int, list[Any]] = {}
        for line in lines:
            if line["step"] == step:
                launches.setdefault(line["launch"], []).append(line)
        assert launches, f"nobody has made step {step}"
        again += len(launches) - 1
        made: list[list[int]] = []
        for _, by in sorted(launches.items()):
            by.sort(key=lambda line: line["rank"])
            assert all(line["line"] == by[0]["line"] for line in by), f"step {step}: {by}"
            if len(by) < by[0]["ranks"]:
                continue  # it died before it wrote it down
            micro = zip(*(line["micro"] for line in by), strict=True)
            made.append([item for parts in micro for part in parts for item in part])
            steps[step], ranks[step], weights[step] = made[-1], by[0]["ranks"], by[0]["line"]
        if not made:
            assert step == max(line["step"] for line in lines), f"step {step}: no group has written down all of it"
            break
        assert all(one == made[0] for one in made), f"step {step}: {made}"
    return Record(steps, ranks, weights, again)


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
