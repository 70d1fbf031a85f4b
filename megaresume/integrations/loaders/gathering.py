"""All ranks together: who writes which state, who must agree with whom, and who gets what back.

Tensor-, pipeline- and context-parallel ranks of one data-parallel rank are its *replicas*: those that read batches
must have read the same number of them, and the first writes the state. A replica may have no loader (it is sent the
batches by another) or have one that it never asks (a pipeline stage in the middle).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from megaresume.checkpoint import beside
from megaresume.checkpoint.layout import rank_file
from megaresume.checkpoint.manifest import FileEntry
from megaresume.integrations.loaders.adapters import Facts
from megaresume.integrations.loaders.reader import LoaderReader
from megaresume.integrations.loaders.record import LoaderRecord, RankState, check_fits
from megaresume.integrations.ranks import gather, on_all_ranks
from megaresume.stream.errors import StateError, UsageError

__all__ = ["Captured", "capture", "restore_states"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """The states of a save that has begun, on one rank."""

    record: LoaderRecord
    #: data-parallel rank and state, which this rank writes; None: another replica does.
    mine: tuple[int, bytes] | None

    def write(self, root: Path, iteration: int, tag: str) -> tuple[FileEntry, ...]:
        """Write this rank's file, if it has one. Returns what it wrote."""
        if self.mine is None:
            return ()
        dp_rank, state = self.mine
        return (beside.write(root, rank_file(iteration, tag, "loader", dp_rank), state),)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Offer:
    """What one process tells the others. Plain values: sent between ranks."""

    dp_rank: int
    facts: Facts | None
    #: batches handed out; trained.
    handed: int
    trained: int
    rank: RankState | None


def capture(
    reader: LoaderReader | None, *, dp_rank: int, dp_size: int, trained: int, sizes: tuple[tuple[int, int], ...]
) -> Captured:
    """Take the states of all ranks. Collective; writes nothing.

    Args:
        reader: of this process; None: it reads no data.
        dp_rank: data-parallel rank of this process.
        dp_size: data-parallel size.
        trained: batches that every data-parallel rank has trained, since the start of the run.
        sizes: (first sample, global batch size in samples) up to here.

    Raises, on every rank:
        StateError: replicas have read different numbers of batches, or a loader gives no usable state.
        UsageError: a data-parallel rank has no loader, or the ranks' loaders differ.
    """

    def take() -> tuple[_Offer, bytes]:
        # A replica that was never asked says so; its state is that of the start.
        if reader is None or reader.is_idle:
            facts = None if reader is None else reader.adapter.facts()
            return _Offer(dp_rank=dp_rank, facts=facts, handed=0, trained=trained, rank=None), b""
        state, skip = reader.state()
        rank = RankState(size=len(state), checksum=xxhash.xxh3_128_hexdigest(state), skip=skip)
        facts = reader.adapter.facts()
        return _Offer(dp_rank=dp_rank, facts=facts, handed=reader.handed, trained=trained, rank=rank), state

    offer, state = on_all_ranks(take)
    offers: list[_Offer] = gather(offer)
    writers = on_all_ranks(lambda: _writers(offers, dp_size))
    first = offers[writers[0]]
    assert first.facts is not None
    ranks = tuple(rank for writer in writers if (rank := offers[writer].rank) is not None)
    record = LoaderRecord(facts=first.facts, batches=trained, ranks=ranks, sizes=sizes)
    here = _position(offers, offer)
    mine = (dp_rank, state) if here in writers and offer.rank is not None else None
    return Captured(record=record, mine=mine)


def _position(offers: list[_Offer], mine: _Offer) -> int:
    import torch.distributed as dist

    return dist.get_rank() if len(offers) > 1 else 0


def _writers(offers: list[_Offer], dp_size: int) -> list[int]:
    """The process that writes for each data-parallel rank."""
    found: list[int] = []
    for dp_rank in range(dp_size):
        there = [number for number, offer in enumerate(offers) if offer.dp_rank == dp_rank and offer.rank is not None]
        if not there:
            raise UsageError(
                f"data-parallel rank {dp_rank} has no loader, or one that was never asked for a batch",
                found=f"none of its processes hands out batches, after {offers[0].trained} batches were trained",
                expected="a loader on at least one process of every data-parallel rank",
                cause="the model was fed from somewhere else",
                action="iterate over what megaresume returned; nothing else may feed the model",
            )
        found.append(there[0])
        for other in there[1:]:
            if offers[other].handed != offers[there[0]].handed:
                raise StateError(
                    f"the replicas of data-parallel rank {dp_rank} have read different numbers of batches",
                    found=f"rank {there[0]}: {offers[there[0]].handed}; rank {other}: {offers[other].handed}",
                    expected="the same number",
                    cause="one of them was asked for a batch that the others were not",
                    action="call next() on every process that holds the loader, or on one that sends batches on",
                )
    kinds = {offer.facts for offer in offers if offer.facts is not None}
    if len(kinds) > 1:
        raise UsageError(
            "the loaders of the ranks differ",
            found="; ".join(sorted(str(kind) for kind in kinds)),
            expected="the same kind, batch size and number of workers on every rank",
            action="make the loader with the same arguments on every rank",
        )
    return found


def restore_states(
    reader: LoaderReader | None, record: LoaderRecord, *, root: Path, iteration: int, tag: str, dp_rank: int, dp: int
) -> None:
    """Put the state of this data-parallel rank back. On every process; raises on its own (see `on_all_ranks`).

    Raises:
        StateError: the run is laid out in another way, or a state is missing or damaged.
    """
    if reader is None:
        return
    check_fits(record, reader.adapter.facts(), dp)
    entry = record.entries(iteration, tag)[dp_rank]
    reader.restore(beside.read(root, entry), record.ranks[dp_rank].skip)
