"""Two ranks iterate over loaders that are alike, and that are not, one after the other: ``agreeing.py FILE``.

Rank 0 writes down, by case, what each of them was given, or the error.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaresume import DataLoader
from megaresume.stream.errors import StateError

ITEMS = torch.arange(20)


def make(items: torch.Tensor = ITEMS, **options: Any) -> DataLoader:
    return DataLoader(items, **{"batch_size": 2, "max_epochs": 2} | options)


def given(*loaders: DataLoader, batches: int = 99) -> list[int]:
    """Items, to the end of the data, or of so many batches."""
    found: list[int] = []
    for loader in loaders:
        for _ in range(loader.epoch, 2):
            for batch in loader:
                found += batch.tolist()
                batches -= 1
                if not batches:
                    return found
    return found


def resumed(batches: int, *, load: bool = True, **options: Any) -> list[int]:
    """Of a run that was left after so many batches, and its other half: what both were given."""
    before = make()
    first = given(before, batches=batches)
    after = make(**options)
    if load:
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    return first + given(after)


def looked(rank: int) -> list[int]:
    """Of a run of one epoch whose rank 0 looks at a batch first."""
    loader = make(max_epochs=1)
    if rank == 0:
        next(iter(loader))
    batches = iter(loader)
    found: list[int] = next(batches).tolist()
    dist.barrier()
    for batch in batches:
        found += batch.tolist()
    return found


def measured() -> list[int]:
    """What ranks at their own pace are given that begin again with the same state, as a validation does."""
    loader, found = make(max_epochs=1), []
    state = loader.state_dict()
    for _ in range(3):
        loader.load_state_dict(state)
        found += given(loader)
        time.sleep(0.1 * dist.get_rank())
    return found


def cases(rank: int) -> Iterator[tuple[str, Callable[[], list[int]]]]:
    yield "alike", lambda: given(make())
    yield "resumed alike", lambda: resumed(3, batch_size=1, num_workers=1)
    yield "copies", lambda: given(loader := make(), copy.copy(loader))
    yield "their own ranks", lambda: given(make(ITEMS + 100 * rank, dp_rank=0, dp_size=1))
    yield "parts", lambda: given(make(ITEMS + 100 * rank))
    yield "lengths", lambda: given(make(torch.arange(20 + rank)))
    yield "seeds", lambda: given(make(seed=rank))
    yield "batch sizes", lambda: given(make(batch_size=2 + rank))
    yield "skips", lambda: given(make(skip=["3:5"] if rank else None))
    yield "one has loaded", lambda: resumed(3, load=rank == 0)
    yield "other states", lambda: resumed(2 + rank)
    yield "one has looked", lambda: looked(rank)
    yield "measured", measured
    # The last one: from here on the ranks have iterated over other numbers of loaders.
    yield "alone", lambda: given(make()) if rank else []


def said_by(case: Callable[[], list[int]]) -> list[int] | str:
    try:
        return case()
    except StateError as error:
        return str(error)


def main() -> None:
    dist.init_process_group("gloo")
    said: dict[str, list[Any]] = {}
    for name, case in cases(dist.get_rank()):
        said[name] = [None] * dist.get_world_size()
        dist.all_gather_object(said[name], said_by(case))
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
