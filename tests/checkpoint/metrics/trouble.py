"""A loop in plain torch, one of whose sinks is away, slow or full. Run by test_trouble.py, in a process of its own.

    trouble.py DATA DIRECTORY STEPS WORDS...

Prints the steps that were made, and the seconds that the loop and its end have taken.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

import megaresume
from megaresume import BatchSchedule, Checkpoints, StreamLoader, open_stream


def main(data: str, directory: Path, steps: int, words: list[str]) -> None:
    """Train so many steps, with a reading in each of them."""
    model = torch.nn.Linear(2, 2)
    loop = megaresume.attach(
        {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)},
        StreamLoader(open_stream(data), BatchSchedule.constant(8), micro_batch_size=8, prefetch=0),
        checkpoints=Checkpoints(save_dir=directory / "run"),
        metrics=["every=0.05", *words],
    )
    begin = time.monotonic()
    for batch in loop:
        model(batch["tokens"][:, :2].float()).sum().backward()
        loop.stepped()
        time.sleep(0.05)
        if loop.step == steps:
            break
    end = time.monotonic()
    loop.finish()
    print(json.dumps({"steps": steps, "loop": end - begin, "end": time.monotonic() - end}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
