"""The states of a loader in a checkpoint, as a `DataState` of kind ``loader``, without pickles in it.

content = {"kind": "energon", "library": "megatron-energon 7.4.1", "dp": 2, "workers": 2, "batch_size": 4,
           "batches": 40,                            trained, by each data-parallel rank
           "sizes": [[0, 16]],                       (first sample, global batch size) up to here
           "ranks": [[31022, "<xxh3_128>", 0], ...]}  by data-parallel rank: bytes, checksum, batches to skip

For all ranks together: which process writes which state, who must agree with whom, and who gets what back.

Tensor-, pipeline- and context-parallel ranks of one data-parallel rank are its *replicas*: those that read batches
must have read the same number, and the first one writes the state. A replica may have no loader (another one sends it
the batches) or have one that is never asked (a middle stage of a pipeline).

All that `megaresume.checkpoint` promises for a stream also holds for such a state, and ``megaresume inspect`` unpickles
nothing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from megaresume.checkpoint.host import Data
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import gather, on_all_ranks, rank
from megaresume.checkpoint.records.envelope import DataState, OpaqueState
from megaresume.checkpoint.records.manifest import FileEntry
from megaresume.checkpoint.records.names import rank_file
from megaresume.checkpoint.records.rank_files import read_rank_file, write_rank_file
from megaresume.checkpoint.records.sealed import count, from_members, text
from megaresume.hosts.loaders import LoaderFacts, LoaderReader
from megaresume.stream.errors import StateError, UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """The state of one data-parallel rank."""

    #: bytes.
    size: int
    #: xxh3_128, 32 hex digits.
    checksum: str
    #: batches to read and drop after the state is restored.
    skip: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderRecord:
    """The states of all data-parallel ranks at one step."""

    facts: LoaderFacts
    #: batches that optimizer steps have trained, per data-parallel rank.
    batches: int
    #: the state of each data-parallel rank.
    ranks: tuple[RankState, ...]
    #: (first sample, global batch size in samples) up to here.
    sizes: tuple[tuple[int, int], ...] = ()

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return len(self.ranks)

    def entries(self, iteration: int, tag: str) -> tuple[FileEntry, ...]:
        """The files with the states, by data-parallel rank: paths relative to ``<save>/megaresume``."""
        return tuple(
            FileEntry(path=rank_file(iteration, tag, "loader", dp_rank), size=rank.size, checksum=rank.checksum)
            for dp_rank, rank in enumerate(self.ranks)
        )

    def to_state(self, samples: int) -> OpaqueState:
        """The state of the data after this many samples trained by all ranks together."""
        content = {
            **asdict(self.facts),
            "dp": self.dp,
            "batches": self.batches,
            "sizes": [list(size) for size in self.sizes],
            "ranks": [[rank.size, rank.checksum, rank.skip] for rank in self.ranks],
        }
        identity = "|".join([str(samples), *(rank.checksum for rank in self.ranks)])
        digest = xxhash.xxh3_64_hexdigest(identity.encode())
        return OpaqueState(kind="loader", samples=samples, digest=digest, content=content)

    @classmethod
    def from_state(cls, state: DataState) -> LoaderRecord:
        """Read the result of `to_state`.

        Raises:
            StateError: the state is of another kind, or lacks a field.
        """
        if not isinstance(state, OpaqueState) or state.kind != "loader":
            raise StateError(
                "the checkpoint was not trained on a loader, and this run has its own loader",
                found="Megatron's own datasets" if state.kind == "order" else "a megaresume stream",
                expected="the states of a loader",
                cause="megaresume.attach was given a data config when it was saved, and is given a loader now",
                action="continue with megaresume.attach(engine, 'data.yaml'); or load the weights alone and start the "
                "data over",
            )
        fields = state.content
        try:
            ranks = [(count(size), text(checksum), count(skip)) for size, checksum, skip in fields["ranks"]]
            return cls(
                facts=from_members(LoaderFacts, fields),
                batches=count(fields["batches"]),
                ranks=tuple(RankState(size=size, checksum=checksum, skip=skip) for size, checksum, skip in ranks),
                sizes=tuple((count(first), count(size)) for first, size in fields["sizes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            what, expected = "the record of the loader's states", "the fields that megaresume writes"
            raise StateError.misshapen(what, error, expected, action="load another checkpoint") from error


#: for a run that has not saved yet.
NO_LOADER = LoaderRecord(
    facts=LoaderFacts(kind="none", library="none", workers=0, batch_size=None), batches=0, ranks=()
)


def check_fits(record: LoaderRecord, now: LoaderFacts, dp: int) -> None:
    """Raise a StateError if the states cannot be restored exactly with this run's loaders.

    Args:
        record: from the checkpoint.
        now: facts about this run's loader.
        dp: current data-parallel size.
    """
    then = record.facts
    if then.kind != now.kind:
        raise StateError(
            "the checkpoint was trained with another kind of loader",
            found=f"{now.kind}: {now.library}",
            expected=f"{then.kind}: {then.library}",
            cause="the loader was replaced between save and resume",
            action="use the same loader; or load the weights alone and start the data over",
        )
    if (record.dp, then.workers) != (dp, now.workers):
        what = "data-parallel size" if record.dp != dp else "number of worker processes"
        raise StateError(
            f"the {what} changed, and the states of this loader belong to the ranks and workers that saved them",
            found=f"{dp} data-parallel ranks with {now.workers} workers each",
            expected=f"{record.dp} data-parallel ranks with {then.workers} workers each",
            cause="samples are dealt out to ranks and workers before they are shuffled and packed; loaded into others, "
            "they would be repeated and skipped",
            action=_remedy(record, dp),
        )
    if then.batch_size != now.batch_size:
        raise StateError(
            "the batch size of the loader changed, and its state counts in batches",
            found=f"{now.batch_size} samples in a batch",
            expected=f"{then.batch_size} samples in a batch",
            cause="the micro-batch size was changed between save and resume",
            action=f"continue with a micro-batch size of {then.batch_size}; the number of gradient accumulation steps "
            "may change",
        )


def _remedy(record: LoaderRecord, dp: int) -> str:
    workers = record.facts.workers
    same = f"start with {record.dp} data-parallel ranks and {workers} workers"
    if record.dp == dp:
        same = f"num_workers={workers}"
    return f"{same}; or a stream of megaresume's, which may change both: megaresume.attach(engine, 'data.yaml')"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Offer:
    """The state offered by one process to the others. Plain values, sent between ranks."""

    dp_rank: int
    facts: LoaderFacts | None
    #: number of batches handed out.
    handed: int
    rank: RankState | None


def _writers(offers: list[_Offer], dp_size: int, trained: int) -> list[int]:
    """The process that writes for each data-parallel rank."""
    found: list[int] = []
    for dp_rank in range(dp_size):
        there = [number for number, offer in enumerate(offers) if offer.dp_rank == dp_rank and offer.rank is not None]
        if not there:
            raise UsageError(
                f"data-parallel rank {dp_rank} has no loader, or one that no batch was taken from",
                found=f"none of its processes hands out batches, after {trained} batches were trained",
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


class LoaderStates(Data):
    """The data of a run with a third-party loader: its states at the start of this process, and at the last `_take`."""

    #: this process's reader; None if it reads no data.
    reader: LoaderReader | None
    #: data-parallel rank of this process, and the data-parallel size.
    dp_rank: int
    dp_size: int
    counts_by = "the batches handed out (the loader does not say where it stands)"

    def _begin(self, state: DataState) -> None:
        """Set the state at the start: nothing is trained since."""
        self._states = [state]
        #: the state that this rank writes in the current save; None if another replica does.
        self._mine: bytes | None = None

    def _take(self, samples: int, *, trained: int, sizes: tuple[tuple[int, int], ...]) -> None:
        """Take the states of all ranks. Collective; writes nothing.

        Args:
            samples: samples trained by all ranks together.
            trained: batches that every data-parallel rank has trained since the start of the run.
            sizes: (first sample, global batch size in samples) up to here.

        Raises, on every rank:
            StateError: replicas have read different numbers of batches, or a loader returns no usable state.
            UsageError: a data-parallel rank has no loader, or the ranks' loaders differ.
        """
        reader, dp_rank = self.reader, self.dp_rank

        def take() -> tuple[_Offer, bytes]:
            facts = None if reader is None else reader.adapter.facts()
            # A replica that was never asked says so; its state is that of the start.
            if reader is None or reader.is_idle:
                return _Offer(dp_rank=dp_rank, facts=facts, handed=0, rank=None), b""
            state, skip = reader.state()
            own = RankState(size=len(state), checksum=xxhash.xxh3_128_hexdigest(state), skip=skip)
            return _Offer(dp_rank=dp_rank, facts=facts, handed=reader.handed, rank=own), state

        offer, state = on_all_ranks(take)
        offers: list[_Offer] = gather(offer)
        writers = on_all_ranks(lambda: _writers(offers, self.dp_size, trained))
        first = offers[writers[0]]
        assert first.facts is not None
        ranks = tuple(one for writer in writers if (one := offers[writer].rank) is not None)
        record = LoaderRecord(facts=first.facts, batches=trained, ranks=ranks, sizes=sizes)
        self._states[1:] = [record.to_state(samples)]
        self._mine = state if rank() in writers and offer.rank is not None else None

    def snapshot(self, samples: int) -> DataState:
        """See `Data`."""
        return next(state for state in reversed(self._states) if state.samples == samples)

    def _put_back(self, record: LoaderRecord, choice: Choice, iteration: int) -> None:
        """Restore the state of this data-parallel rank. On every process; raises on one rank (see `on_all_ranks`).

        Raises:
            StateError: the run has another layout, or a state is missing or damaged.
        """
        if self.reader is None:
            return
        check_fits(record, self.reader.adapter.facts(), self.dp_size)
        entry = record.entries(iteration, choice.tag.removesuffix("_universal"))[self.dp_rank]
        self.reader.restore(read_rank_file(choice.load_dir, entry), record.ranks[self.dp_rank].skip)

    def write_files(self, save_dir: Path, iteration: int, tag: str) -> tuple[FileEntry, ...]:
        """See `Data`."""
        if self._mine is None:
            return ()
        return (write_rank_file(save_dir, rank_file(iteration, tag, "loader", self.dp_rank), self._mine),)
