"""`Agreement`: whether all ranks that iterate over a loader have the same data and continue at the same sample.

Each rank assigns samples by itself. If one had other data, other batches or another state, samples would be trained
twice or not at all, and no rank would notice.

At each ``for``, the first rank to arrive stores its order in the process group's store, and the others compare theirs:
    rank 0: compare_set(key, "", mine) -> mine                    ... trains on
    rank 1:                               compare_set(key, "", mine) -> rank 0's: if it differs, refuse

This takes one round trip, and no collective: nobody waits, and ranks that never arrive are not missed (one rank may
iterate alone, for an evaluation). The rank that refuses ends the run.

A rank that looks at a batch before the others begin has left its first ``for`` where they are still in it. The
difference would show at its second ``for``, which the others may never reach. So they also check within a ``for``,
after 2, 4, 8, … batches and at the end, whether another rank left it at a sample that they have passed.
"""

from __future__ import annotations

import itertools
import json

import torch.distributed as dist
import xxhash

from megaresume.stream.errors import StateError
from megaresume.stream.stream import Stream

#: loaders of this process that have been compared.
_loaders = itertools.count()


def order_of(stream: Stream) -> str:
    """What all ranks must have in common to assign the same order of the same data."""
    return repr((stream.config.to_dict(), sorted(stream.fingerprints.items()), stream.skips))


class Agreement:
    """The agreement of the ranks on one loader's order."""

    def __init__(self) -> None:
        self._key: str | None = None
        self._rounds = 0

    def __reduce__(self) -> tuple[type[Agreement], tuple[()]]:
        """A copy counts as another loader."""
        return Agreement, ()

    def check(self, stream: Stream, layout: str, sample: int, *, continues: bool) -> None:
        """Check at a ``for``, on a rank of torch.distributed, that all ranks deal out the same order.

        Args:
            stream: the order.
            layout: how it is dealt out, and where it continues, in words.
            sample: where it continues.
            continues: whether the previous ``for`` was left there; otherwise a state was loaded in between.

        Raises:
            StateError: another rank differs at the same ``for``.
        """
        if self._key is None:
            # Numbered by first iteration, as a rank may make a loader that it never uses.
            self._key = f"megaresume/loader/{next(_loaders)}"
        self._rounds += 1
        sizes = ", ".join(f"{name} {one.documents}" for name, one in itertools.islice(stream.fingerprints.items(), 4))
        mine = [
            xxhash.xxh3_128_hexdigest(order_of(stream).encode()),
            f"seed {stream.config.seed}, items: {sizes}; {layout}",
        ]
        said = json.dumps([dist.get_rank(), *mine, sample if continues else None])
        try:
            store = dist.distributed_c10d._get_default_store()
            first = json.loads(store.compare_set(self._round(), "", said))
        except RuntimeError:  # a store without comparisons, or its host has exited
            return
        if first[1:3] != mine:
            raise StateError(
                "the ranks disagree on the data",
                found=f"rank {first[0]}: {first[2]}; rank {dist.get_rank()}: {mine[1]}",
                expected="the same on every rank" + ("" if first[2] != mine[1] else ": these hold other items"),
                cause="each rank has its own part of the dataset; load_state_dict was called on some ranks only, or "
                "with different states; a for was left earlier on some ranks; or they iterate over different loaders",
                action="give every rank the whole dataset, with the same arguments, and load the same state on every "
                "rank; for a loader of one rank alone: DataLoader(..., dp_rank=0, dp_size=1)",
            )

    def check_not_left(self, sample: int) -> None:
        """Check within the current ``for``, once all samples before this one are handed out.

        Raises:
            StateError: another rank has left it at an earlier sample, and begun its next one.
        """
        key = self._round(1)
        try:
            store = dist.distributed_c10d._get_default_store()
            if not store.check([key]):
                return
            rank, *_, left = json.loads(store.get(key))
        except RuntimeError:
            return
        if left is not None and left < sample:
            raise StateError(
                "the ranks disagree on the data",
                found=f"rank {rank} left a for at sample {left}, and began another; rank {dist.get_rank()} is at "
                f"sample {sample} of that for",
                expected="each for left at the same sample on every rank",
                cause=f"rank {rank} looked at a batch, as in next(iter(loader)), or left a for early: what it was "
                "handed out counts as trained",
                action="to look at a batch: collate_fn([dataset[0], dataset[1]]); leave a for on all ranks at once",
            )

    def _round(self, ahead: int = 0) -> str:
        """The key of a ``for``."""
        return f"{self._key}/{self._rounds + ahead}"
