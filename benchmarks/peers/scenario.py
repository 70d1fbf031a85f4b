"""What is tried: a run of two epochs, killed in its second one, and resumed with one thing changed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

#: of every run; it is killed in the last one.
EPOCHS = 2
#: steps between checkpoints.
SAVE_EVERY = 7
SEED = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a user may change between two starts of a run."""

    ranks: int = 2
    #: processes of each rank that read data.
    workers: int = 2
    #: samples of a batch of one rank.
    batch_size: int = 8
    #: samples of the dataset, which are the numbers 0, 1, ...
    items: int = 960

    @property
    def global_batch(self) -> int:
        """Samples of a step, all ranks together."""
        return self.ranks * self.batch_size


BEFORE = Layout()

#: what changed -> the layout of the resume. Every global batch divides both sizes of the dataset, so that no tool has
#: to pad an epoch or to drop its end.
CHANGES = {
    "nothing": BEFORE,
    "ranks": replace(BEFORE, ranks=4, batch_size=4),  # with the same global batch, as one would
    "workers": replace(BEFORE, workers=4),
    "batch size": replace(BEFORE, batch_size=4),
    "more data": replace(BEFORE, items=1056),
}

#: columns of the table.
TITLES = {
    "nothing": "nothing",
    "ranks": "ranks, 2 to 4",
    "workers": "workers, 2 to 4",
    "batch size": "batch size, halved",
    "more data": "data, 10 % more",
}


def kill_steps(number: int, seed: int = 7) -> list[int]:
    """Steps after which runs are killed: at random in the last epoch, the same for all tools.

    None is so early that the newest checkpoint is of the epoch before, whose end some tools save in another way.
    """
    steps = BEFORE.items // BEFORE.global_batch
    choose = random.Random(seed)
    return sorted((EPOCHS - 1) * steps + choose.randrange(SAVE_EVERY, steps) for _ in range(number))
