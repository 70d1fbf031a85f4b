"""`ItemData`: the micro-batches of an engine from a `megaresume.DataLoader`.

One order and one count of samples for all ranks, as in `TrainingData`: a resume may have other ranks, workers and
micro-batch sizes. The loader is not the clock, since it counts what it handed out: a checkpoint has the state after the
samples that ``engine.global_steps`` steps have trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.host import StreamData
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import on_all_ranks
from megaresume.checkpoint.records.envelope import DataState, stream_of
from megaresume.checkpoint.session import Session
from megaresume.hosts.deepspeed import engine as facts
from megaresume.hosts.deepspeed.engine_data import EngineData
from megaresume.hosts.deepspeed.witness import MicroBatch
from megaresume.hosts.endless import Endless, check_endless, check_steps
from megaresume.hosts.feeds import ItemFeed
from megaresume.stream.batches import BatchSchedule


class ItemData(StreamData, EngineData):
    """Iterates over this rank's micro-batches without end, epoch after epoch; created by `megaresume.attach`."""

    state_in_words = "no state of its DataLoader", "a DataLoader at its beginning", "the state"

    def __init__(self, engine: Any, feed: ItemFeed, session: Session) -> None:
        super().__init__(engine, session)
        self.feed, self.loader, self.stream = feed, feed.loader, feed.stream
        self.balance, self.loader.meter = self.loader.balance, session.meter
        self._batches = Endless(feed)
        self._count_from(int(engine.global_steps), 0)

    @property
    def num_workers(self) -> int:
        """Worker processes of this rank."""
        return int(self.loader.num_workers)

    @property
    def schedule(self) -> BatchSchedule:
        """Global batch sizes up to now."""
        assert self.stream.schedule is not None
        return self.stream.schedule

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """See `Data`."""
        return self.feed.origin

    def prepare(self) -> None:
        """See `Data`."""
        on_all_ranks(self.check_save)

    def snapshot(self, samples: int) -> DataState:
        """See `Data`."""
        return self.feed.snapshot(samples)

    def restore(self, state: DataState, choice: Choice) -> None:
        """See `Data`. It may have been saved with any number of ranks, workers and samples in a micro-batch."""
        of_stream = stream_of(state)
        self._close()
        self.feed.restore(of_stream, choice)
        self._count_from(int(self.engine.global_steps), of_stream.samples)
        self._ready, self._closed = True, None

    def next_sample(self) -> int:
        """See `Data`."""
        return self.feed.next_sample()

    def describe(self) -> list[str]:
        """See `Data`."""
        return self.feed.describe()

    def __iter__(self) -> ItemData:
        """Begin at the first micro-batch that is not trained. In the middle of an accumulation: continue."""
        if self._ahead and self._count.is_idle:
            self._close()
        self._begin_again()
        return self

    def _read(self) -> tuple[Any, MicroBatch]:
        begin = self._count.end
        batch = self._batches.next(begin)
        name = f"samples {begin} to {self.loader.samples - 1}"
        return batch, self._as_known(batch, name)

    def _open_step(self) -> None:
        self._step_begins()
        self._check_clock()
        check_sizes(self.engine, self.loader)
        self._count.begin(self.loader.step_samples)
        self._per_step = self.loader.accumulation

    def _close(self) -> None:
        """Stop reading ahead, so that reading continues after the trained samples."""
        self._batches.close(self._count.samples)
        self._ahead.clear()


def check_loader(engine: Any, loader: Any) -> None:
    """Raise a UsageError unless it is a `DataLoader` without an end, for the engine's rank and sizes."""
    end = "stop when engine.global_steps is EPOCHS * len(dataset) // engine.train_batch_size()"
    group = "engine.data_parallel_group"
    given = f"dp_rank=torch.distributed.get_rank({group}), dp_size=torch.distributed.get_world_size({group})"
    check_endless(loader, "the engine", (facts.data_rank(engine), facts.data_size(engine)), end, given)
    check_sizes(engine, loader)


def check_sizes(engine: Any, loader: DataLoader) -> None:
    """Raise a UsageError if the loader's steps differ from the engine's, whose batch size may change in mid-run."""
    micro, accumulation = int(engine.train_micro_batch_size_per_gpu()), int(engine.gradient_accumulation_steps())
    said = (
        f"train_micro_batch_size_per_gpu {micro}, gradient_accumulation_steps {accumulation}, of the DeepSpeed config"
    )
    check_steps(loader, "the engine", micro, accumulation, said)
