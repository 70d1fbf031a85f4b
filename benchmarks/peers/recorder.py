"""What was trained, written by the ranks themselves and counted apart from every loader.

Each rank appends a line for each step that it has trained, at once, so that a SIGKILL loses none:

    17 403 12 88        after step 17: the numbers of its samples

Every job loses the steps after its last checkpoint and trains them again. They are no repeats: what counts are the
steps up to the checkpoint that the resume loaded, and all steps after the resume.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

#: step -> the samples that all ranks trained in it.
Steps = Mapping[int, list[int]]


class Recorder:
    """The record of one rank in one life of the run."""

    def __init__(self, directory: Path, life: int, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = os.open(directory / f"life-{life}.rank-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def began(self, step: int) -> None:
        """Training begins, or goes on from the checkpoint of this step."""
        os.write(self._file, f"from {step}\n".encode())

    def trained(self, step: int, samples: Iterable[int]) -> None:
        """This rank has trained these samples in this step."""
        os.write(self._file, f"{step} {' '.join(map(str, samples))}\n".encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What the ranks recorded between a start of the run and its end."""

    #: step of the checkpoint that was loaded; 0: none.
    start: int
    steps: Steps


def read(directory: Path, life: int) -> Life | None:
    """The record of a life; None if no rank began to train."""
    start: int | None = None
    steps: dict[int, list[int]] = {}
    for path in sorted(directory.glob(f"life-{life}.rank-*")):
        for line in path.read_text().splitlines():
            first, *rest = line.split()
            if first == "from":
                start = int(rest[0])
            else:
                steps.setdefault(int(first), []).extend(map(int, rest))
    return None if start is None else Life(start=start, steps=steps)


def survived(lives: list[Life]) -> Steps:
    """The steps that are in the weights at the end."""
    steps: dict[int, list[int]] = {}
    for life in lives:
        steps = {step: samples for step, samples in steps.items() if step <= life.start} | dict(life.steps)
    return steps


def count(steps: Steps, *, epochs: int, items: int) -> tuple[float, float]:
    """Per cent of an epoch's samples that were repeated, and that were left out.

    Args:
        steps: that survived, of a run of so many epochs.
        epochs: how often each sample of the dataset should have come.
        items: samples of the dataset when the run began. Samples that were added later may come once or not at all.
    """
    times = Counter(sample for samples in steps.values() for sample in samples)
    repeated = sum(max(0, n - (epochs if sample < items else 1)) for sample, n in times.items())
    never = sum(max(0, epochs - times[sample]) for sample in range(items))
    return 100 * repeated / items, 100 * never / items
