"""The data of a loop: `ItemFeed` for a `DataLoader`, `StreamFeed` for a `StreamLoader`.

Each is the `Data` of a session, and a `Feed`: micro-batches from a sample on, and the number of samples in a step.
For trainers that count epochs themselves: `micro_batches`, `micro_batches_to`, `warn_of_left_over`.

The feeds of all processes form one run: each sample of a step is trained by exactly one rank. Every loader deals out
samples independently, by its number among the data-parallel ranks. `check_shares` compares these numbers between
processes, and everything else that dealing depends on; `check_same_data` compares the data. Processes that train the
same samples together (tensor, pipeline, context parallelism) have the same number: see `megaresume.hosts.parallelism`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, Protocol

from megaresume.batches.agreement import order_of
from megaresume.batches.data_loader import DataLoader
from megaresume.batches.loader import StreamLoader
from megaresume.batches.rank_loader import available
from megaresume.checkpoint.host import StreamData, change_lines
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import gather, known_to_all, on_all_ranks, on_rank_0, same_on_all_ranks, world_size
from megaresume.checkpoint.records.envelope import DataState, stream_of
from megaresume.checkpoint.system import Topology
from megaresume.hosts.attach import kind_of
from megaresume.stream.dealing import in_parts, places_of
from megaresume.stream.errors import StateError, UsageError, listed
from megaresume.stream.left_out import NO_FAULTS, FaultRecord, Faults

log = logging.getLogger(__name__)


class Feed(StreamData, Protocol):
    """The micro-batches of one rank. All positions count samples of all ranks together."""

    #: this rank's `DataLoader` or `StreamLoader`.
    loader: Any
    #: whether the data ends before a step that would be short.
    whole_steps: bool

    @property
    def layout(self) -> str:
        """How samples are divided into steps and micro-batches; the same on every rank."""

    def read(self, sample: int) -> Iterator[Any]:
        """The micro-batches from a sample on, at which a step begins, to the end of the epoch or of the data."""

    def pass_end(self, sample: int) -> int | None:
        """The end of a ``for`` that begins at this sample; it ends with the step that gets there. None: the data's."""

    def has(self, sample: int) -> bool:
        """Whether the data has, from this sample on, a micro-batch for every rank; or a step, by ``whole_steps``."""

    def after(self, batch: Any, sample: int) -> int:
        """The sample after a micro-batch that was just read, and that begins at ``sample``."""

    def numbers(self, first: int, stop: int, *, step: int) -> Sequence[int]:
        """The samples that this rank got in a micro-batch ``first .. stop`` of all ranks.

        Args:
            first, stop: samples.
            step: the first sample of its step.
        """
        loader = self.loader
        if loader.balance is None:
            return range(first, stop)[next(places_of([stop - first], dp_rank=loader.dp_rank, dp_size=loader.dp_size))]
        samples, size = next(loader.runs_of_steps(step, end=self.end))
        return next(mine for end, mine in loader.deal(samples, size) if end == stop)

    @property
    def end(self) -> int | None:
        """The sample at which the last step is cut off, even in the middle; None: where the data ends."""
        return None

    def size_at(self, sample: int) -> int:
        """The number of samples in the step that begins at this sample, unless the data ends before."""

    def topology(self, sample: int) -> Topology:
        """The layout of the run at the step that begins at this sample."""

    def trained(self, sample: int) -> None:
        """Note that a step has trained the samples before this one."""
        return

    def check_unread(self, sample: int) -> None:
        """Check that nothing but the steps has read, which are at this sample. Raises StateError: something has."""
        return


class ItemFeed(Feed):
    """The items of a `DataLoader`.

    Args:
        loader: of this rank.
    """

    def __init__(self, loader: DataLoader) -> None:
        self.loader, self.stream, self.whole_steps = loader, loader.stream, loader.drop_last
        loader.is_compared = True

    @property
    def layout(self) -> str:
        """See `Feed`."""
        return self.loader.layout

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """See `Data`: the items by number."""
        return self.loader.origin

    def snapshot(self, samples: int) -> DataState:
        """See `Data`."""
        return self.loader.state_at(samples)

    def restore(self, state: DataState, choice: Choice) -> None:
        """See `Data`."""
        self.loader.restore(stream_of(state))

    def next_sample(self) -> int:
        """See `Data`."""
        return self.loader.samples

    def describe(self) -> list[str]:
        """See `Data`."""
        return change_lines(self.loader.stream, self.loader.step_samples)

    def read(self, sample: int) -> Iterator[Any]:
        """See `Feed`. Raises StateError: see `check_unread`."""
        self.check_unread(sample)
        return iter(self.loader)

    def check_unread(self, sample: int) -> None:
        """See `Feed`."""
        if self.loader.samples != sample:
            raise StateError(
                "something else read from the loader",
                found=f"the DataLoader at sample {self.loader.samples}; the steps of the run at sample {sample}",
                expected="the same",
                cause="a `for` over the loader itself, a batch taken from trainer.get_train_dataloader(), or "
                "loader.load_state_dict; it would never be trained",
                action="leave the loader to the trainer, or to `for batch in loop`; to look at a batch: "
                "collate_fn([dataset[0], dataset[1]])",
            )

    @property
    def end(self) -> int | None:
        """See `Feed`."""
        return self.loader.stop

    def pass_end(self, sample: int) -> int:
        """See `Feed`: the end of the epoch."""
        return self.loader.epoch_end

    def has(self, sample: int) -> bool:
        """See `Feed`."""
        return self.loader.has_batches_at(sample)

    def after(self, batch: Any, sample: int) -> int:
        """See `Feed`."""
        return self.loader.samples

    def size_at(self, sample: int) -> int:
        """See `Feed`."""
        return self.loader.step_samples

    def topology(self, sample: int) -> Topology:
        """See `Feed`."""
        return _topology(self.loader, self.loader.batch_size, self.loader.step_samples)


class RankFaults:
    """Records that differed from the index, among trained samples.

    Args:
        known: those of all ranks before a sample.
        to: that sample.
    """

    def __init__(self, known: Faults, to: int) -> None:
        self.known, self._to = known, to
        # Of this rank since then, including samples that are not trained yet.
        self._new: list[FaultRecord] = []

    def add(self, batch: Mapping[str, Any]) -> None:
        """Add the faults of a batch that was read."""
        self._new += batch.get("faults", ())

    def gather(self, trained: int) -> None:
        """Combine the faults of all ranks, for the samples before this one. Collective.

        Ranks that read the same samples have the same faults, which count once.
        """
        everywhere = chain.from_iterable(gather([fault for fault in self._new if fault[0] < trained]))
        self.known = self.known.with_new(everywhere, self._to, trained)
        self._new = [fault for fault in self._new if fault[0] >= trained]
        self._to = trained

    def up_to(self, trained: int) -> Faults:
        """The faults known on this rank, for the samples before this one."""
        return self.known.with_new(self._new, self._to, trained)


class StreamFeed(Feed):
    """The samples of a `StreamLoader`.

    Args:
        loader: of this rank.
        whole_steps: end the data before a step that would be short.
    """

    def __init__(self, loader: StreamLoader, *, whole_steps: bool = False) -> None:
        self.loader, self.whole_steps, self._planned = loader, whole_steps, loader.schedule
        loader.at_end = "drop" if whole_steps else "deal"
        self.stream = loader.stream
        self._set_base(loader.start)

    def _set_base(self, sample: int) -> None:
        before = self.stream.base_state
        schedule = self._planned.resumed(() if before is None else before.batches, sample)
        self.loader.schedule = self.stream.schedule = schedule
        self._faults = RankFaults(NO_FAULTS if before is None else before.faults, sample)
        self._trained = sample
        #: (first sample, samples) of the last step of the data, if it was short and is trained.
        self._short: tuple[int, int] | None = None

    @property
    def layout(self) -> str:
        """See `Feed`."""
        loader = self.loader
        return (
            f"micro_batch_size={loader.micro_batch_size}, {loader.schedule}, balance={loader.balance}, "
            f"samples {loader.start} to {loader.stop}"
        )

    def prepare(self) -> None:
        """See `Data`: gathers the faults of all ranks, each of which has read its own samples."""
        self._faults.gather(self._trained)

    def snapshot(self, samples: int) -> DataState:
        """See `Data`."""
        batches = self.loader.schedule.until(samples)
        if self._short is not None and samples == sum(self._short):
            batches = (*self.loader.schedule.until(self._short[0]), self._short)
        return self.stream.state_at(samples, batches=batches).replace(faults=self._faults.known)

    def restore(self, state: DataState, choice: Choice) -> None:
        """See `Data`."""
        self.stream.restore(stream_of(state))
        self._set_base(self.stream.start)
        self.loader.start = self.stream.start

    def next_sample(self) -> int:
        """See `Data`."""
        return self.loader.start

    def describe(self) -> list[str]:
        """See `Data`."""
        return change_lines(self.stream, self.size_at(self.stream.start))

    def read(self, sample: int) -> Iterator[Any]:
        """See `Feed`."""
        self.loader.start = sample
        return iter(self.loader)

    def pass_end(self, sample: int) -> int | None:
        """See `Feed`."""
        return self.loader.stop

    def has(self, sample: int) -> bool:
        """See `Feed`."""
        needed = self.size_at(sample) if self.whole_steps else self.loader.dp_size
        return self.stream.reaches(sample + needed)

    def after(self, batch: Any, sample: int) -> int:
        """See `Feed`."""
        self._faults.add(batch)
        micro, dp, size = self.loader.micro_batch_size, self.loader.dp_size, self.size_at(self._trained)
        if (there := available(self.stream, self._trained, size)) == size:
            return sample + micro * dp
        ends = accumulate(in_parts(there, micro_batch_size=micro, dp_size=dp), initial=self._trained)
        return next(end for end in ends if end > sample)

    def size_at(self, sample: int) -> int:
        """See `Feed`."""
        return self.loader.schedule.size_at(sample)

    def topology(self, sample: int) -> Topology:
        """See `Feed`."""
        return _topology(self.loader, self.loader.micro_batch_size, self.size_at(sample))

    def trained(self, sample: int) -> None:
        """See `Feed`."""
        if sample - self._trained < self.size_at(self._trained):
            self._short = self._trained, sample - self._trained
        self._trained = sample


def feed_of(loader: Any, *, whole_steps: bool = False) -> Feed:
    """The feed for the loader that a loop trains on.

    Args:
        loader: of this rank.
        whole_steps: for a stream, do not train a short last step.

    Raises:
        UsageError: it is not one of megaresume's loaders.
    """
    if isinstance(loader, DataLoader):
        return ItemFeed(loader)
    if isinstance(loader, StreamLoader):
        return StreamFeed(loader, whole_steps=whole_steps)
    raise UsageError(
        "megaresume.attach needs a loader of megaresume's",
        found=kind_of(loader),
        expected="a megaresume.DataLoader, or a megaresume.StreamLoader",
        cause="a loader of torch's or torchdata's, a dataset, a stream, or a loader that was prepared or wrapped",
        action="megaresume.DataLoader(dataset, batch_size) around a map-style dataset; "
        "megaresume.StreamLoader(stream, schedule, micro_batch_size=...) around a stream",
    )


def micro_batches_to(loader: DataLoader, end: int, sample: int) -> int:
    """The number of micro-batches of steps from a sample on that reach the end of an epoch; or of the run."""
    samples = -(-(end - sample) // loader.step_samples) * loader.step_samples
    if loader.stop is not None:
        samples = max(min(samples, loader.stop - sample), 0)
    return micro_batches(loader, samples - samples % loader.step_samples if loader.drop_last else samples)


def micro_batches(loader: DataLoader, samples: int) -> int:
    """The number of micro-batches in this many samples from the beginning of a step on; every rank must get some."""
    return samples // loader.step_samples * loader.accumulation + len(_last_parts(loader, samples))


def warn_of_left_over(loader: DataLoader, samples: int) -> None:
    """Warn on rank 0 about samples, of those left to the end of the run, that cannot be given to all ranks."""
    short = samples % loader.step_samples
    left = short - sum(_last_parts(loader, samples))
    if left and not loader.dp_rank:
        log.warning(
            "megaresume: the last %d of the run's items will not be trained: its last step has %d, which cannot be "
            "shared out to %d ranks%s; resumed on fewer ranks, the run trains them",
            left,
            short,
            loader.dp_size,
            "" if short < loader.dp_size else " one at a time",
        )


def _last_parts(loader: DataLoader, samples: int) -> list[int]:
    short = samples % loader.step_samples
    return in_parts(short, micro_batch_size=loader.batch_size, dp_size=loader.dp_size)


def _topology(loader: DataLoader | StreamLoader, micro_batch_size: int, step_samples: int) -> Topology:
    return Topology(
        world_size=world_size(),
        dp=loader.dp_size,
        num_workers=loader.num_workers,
        micro_batch_size=micro_batch_size,
        global_batch_size=step_samples,
        balance=loader.balance,
    )


#: An action for loaders with other numbers.
LEAVE_OUT = "leave dp_rank and dp_size out: they are then torch.distributed's"


def check_shares(feed: Feed) -> None:
    """Refuse loaders with which samples would be trained twice, or not at all. Collective.

    Raises, on every rank:
        UsageError: they are for other ranks.
        StateError: their steps differ.
    """
    shares = gather((feed.loader.dp_rank, feed.loader.dp_size))
    size, times = shares[0][1], Counter(rank for rank, _ in shares)
    if any(other != size for _, other in shares) or times != dict.fromkeys(range(size), len(shares) / size):
        found = [f"process {number}: {rank} of {of}" for number, (rank, of) in enumerate(shares)]
        error = UsageError(
            "the loaders of the processes do not cover all data-parallel ranks",
            found=listed(found, 8),
            expected="one dp_size, and each dp_rank from 0 to dp_size - 1 in as many processes as any other",
            cause="dp_rank is the number on a node (LOCAL_RANK), or one that was written down",
            action=f"{LEAVE_OUT}; with tensor, pipeline or context parallelism, take them from the mesh",
        )
        raise known_to_all(error)
    same_on_all_ranks(
        feed.layout,
        "the batches",
        cause="the loaders were made with other numbers",
        action="make them with the same ones on every rank",
    )


def check_same_data(feed: Feed | None) -> None:
    """Raise a StateError on every rank unless all loaders have the same order of the same data. Collective.

    Args:
        feed: of this rank; None on one that reads no data, which cannot be rank 0.
    """

    def order() -> str:
        assert feed is not None
        return order_of(feed.stream)

    # Rank 0 first: it saves the fingerprints beside the corpora, so that other ranks need not compute them again.
    of_rank_0 = on_rank_0(order)
    same_on_all_ranks(
        on_all_ranks(lambda: of_rank_0 if feed is None else order()),
        "the data",
        cause="each rank has its own part of it; the nodes have different copies; or it was made with random numbers, "
        "or with other skips",
        action="give every rank all of it, from the same files, with the same seed and skips: the loader deals it out",
    )
