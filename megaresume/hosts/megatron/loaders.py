"""The script's own training loader, under ``--dataloader-type external``:

    def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
        ...
        return train_loader, valid_loader, test_loader      # None on ranks without data
    pretrain(megaresume.provider(train_valid_test_datasets_provider), ...)

Its clock is ``args.consumed_train_samples``: a checkpoint holds the state after exactly those samples, whatever was
fetched beyond them.

    `ItemOrder`    a `megaresume.DataLoader`: one order for all ranks, and one state, the same on every rank
    `LoaderOrder`  Energon's, torchdata's or another loader with its own state: one per data-parallel rank, written
                   beside the checkpoint before its commit

Which of the two it is becomes known only when the provider is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.host import Data
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import gather, is_rank_0, on_all_ranks, on_rank_0
from megaresume.checkpoint.records.envelope import DataState, stream_of
from megaresume.hosts.endless import Endless, check_endless, check_steps
from megaresume.hosts.feeds import ItemFeed, check_same_data
from megaresume.hosts.loader_states import NO_LOADER, LoaderRecord, LoaderStates
from megaresume.hosts.loaders import LoaderReader, adapter_of
from megaresume.hosts.megatron.arguments import schedule_from_args
from megaresume.hosts.megatron.host import MegatronHost
from megaresume.hosts.megatron.load_rules import BEGIN_ANEW
from megaresume.hosts.megatron.project import data_parallel
from megaresume.stream.errors import StateError, UsageError
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream


class GivenLoader:
    """The training loader as Megatron iterates it: ``iter()`` changes nothing, and it never ends."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        #: Its micro-batches, from where training continues.
        self.batches: Iterator[Any] | LoaderReader | None = None

    def __iter__(self) -> GivenLoader:
        return self

    def __next__(self) -> Any:
        """The next micro-batch, as the loader made it."""
        assert self.batches is not None
        return next(self.batches)


class LoaderOrder(LoaderStates):
    """A loader that has its own state.

    Args:
        host: whose checkpoint is loaded.
        loader: this process's; None if it reads no data.
    """

    def __init__(self, host: MegatronHost, loader: Any) -> None:
        self._args = host.args
        self.dp_rank, self.dp_size = data_parallel(host.project)
        self._base = host.samples()
        self._begin(NO_LOADER.to_state(0) if host.loaded is None else host.loaded.state)
        self.record = NO_LOADER if host.loaded is None else LoaderRecord.from_state(host.loaded.state)
        self.reader = None if loader is None else LoaderReader(adapter_of(loader), self.trained)

    @property
    def batches(self) -> LoaderReader | None:
        """The micro-batches of this process."""
        return self.reader

    def trained(self) -> int:
        """The number of batches per data-parallel rank that ``consumed_train_samples`` amounts to."""
        samples = int(self._args.consumed_train_samples) - self._base
        return self.record.batches + samples // (self.dp_size * int(self._args.micro_batch_size))

    def prepare(self) -> None:
        """See `Data`: takes the states of all ranks' loaders at exactly the consumed samples."""
        sizes = ((0, int(self._args.global_batch_size)),)
        samples = int(self._args.consumed_train_samples)
        self._take(samples, trained=self.trained(), sizes=sizes)

    def restore(self, state: DataState, choice: Choice) -> None:
        """See `Data`."""
        self._put_back(LoaderRecord.from_state(state), choice, choice.iteration or 0)

    def next_sample(self) -> int | None:
        """See `Data`."""
        if self.reader is None:
            return None
        share = self.dp_size * int(self._args.micro_batch_size)
        return self._base + (self.reader.handed - self.record.batches) * share


class ItemOrder(Data):
    """A `megaresume.DataLoader`. Creating one is collective.

    Args:
        host: whose checkpoint is loaded.
        loader: this process's; None if it reads no data. Rank 0 always does.

    Raises, on every rank:
        UsageError: some ranks have another kind of loader, or its steps differ from Megatron's.
        StateError: the loaders of the ranks have different data, or the checkpoint was not trained with such a loader.
    """

    def __init__(self, host: MegatronHost, loader: Any) -> None:
        self._samples = host.samples
        on_all_ranks(lambda: _check_items(host, loader) if loader is not None or is_rank_0() else None)
        self.feed = None if loader is None else ItemFeed(loader)
        check_same_data(self.feed)
        #: What rank 0 sent, on a process that reads no data.
        self._told = on_all_ranks(lambda: None if host.loaded is None else stream_of(host.loaded.state))
        self._tells = None in gather(loader is not None or None)
        self.batches: Iterator[Any] | None = None
        if self.feed is not None:
            self.feed.loader.ends_elsewhere, self.feed.loader.meter = True, host.session.meter
            self.batches = _every_epoch(self.feed)

    @property
    def stream(self) -> Stream | None:
        """The order; None if this process reads no data."""
        return None if self.feed is None else self.feed.stream

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """See `Data`."""
        return None if self.feed is None else self.feed.origin

    def prepare(self) -> None:
        """See `Data`: rank 0 sends the state to processes that read no data."""
        if self._tells:
            self._told = StreamState.from_json(on_rank_0(lambda: self.snapshot(self._samples()).to_json()))

    def snapshot(self, samples: int) -> StreamState:
        """See `Data`."""
        if self.feed is not None:
            return stream_of(self.feed.snapshot(samples))
        assert self._told is not None and self._told.samples == samples
        return self._told

    def read_back(self, state: DataState) -> None:
        """See `Data`."""
        if self.feed is not None:
            self.feed.read_back(state)

    def restore(self, state: DataState, choice: Choice) -> None:
        """See `Data`. It may have been saved with any number of ranks and workers, and any micro-batch size."""
        if self.feed is not None:
            self.feed.restore(state, choice)

    def next_sample(self) -> int | None:
        """See `Data`."""
        return None if self.feed is None else self.feed.next_sample()

    def describe(self) -> list[str]:
        """See `Data`."""
        return [] if self.feed is None else self.feed.describe()


def _every_epoch(feed: ItemFeed) -> Iterator[Any]:
    batches = Endless(feed)
    while True:
        yield batches.next(feed.loader.samples)


def _check_items(host: MegatronHost, loader: Any) -> None:
    args = host.args
    ranks, micro = data_parallel(host.project), int(args.micro_batch_size)
    given = "dp_rank=mpu.get_data_parallel_rank(), dp_size=mpu.get_data_parallel_world_size()"
    check_endless(loader, "Megatron", ranks, "end with --train-iters or --train-samples", given)
    schedule = schedule_from_args(args, host.project, host.samples())
    if schedule.segments[-1][0] > host.samples():
        raise UsageError(
            "a megaresume.DataLoader makes steps of one size, and the global batch size is to change",
            found="--rampup-batch-size or --step-batch-size-schedule",
            expected="one --global-batch-size",
            action="remove the flag; or train on a data.yaml (--megaresume-data), whose steps may grow",
        )
    size = schedule.size_at(host.samples())
    said = f"--micro-batch-size {micro}, --global-batch-size {size}, on {ranks[1]} data-parallel ranks"
    check_steps(loader, "Megatron", micro, size // (micro * ranks[1]), said)


def build_with_loaders(current: MegatronHost, original: Callable[..., Any], provider: Callable[..., Any]) -> Any:
    """Megatron's ``build_train_valid_test_data_iterators`` over loaders, restored if training continues. Collective.

    Raises, on every rank:
        StateError: training continues, but there is no state, or it does not fit.
        UsageError: a loader without a state, or whose steps differ from Megatron's.
    """
    from megaresume.hosts.megatron.checkpointing import after_data_is_built

    on_all_ranks(lambda: _check_state(current))
    given: list[GivenLoader] = []

    @functools.wraps(provider)
    def provide(*args: Any, **kwargs: Any) -> Any:
        train, *others = provider(*args, **kwargs)
        if train is None:
            return (None, *others)
        given.append(GivenLoader(train))
        return (given[-1], *others)

    result = original(provide)
    of_this_process = given[0] if given else None
    loader = None if of_this_process is None else of_this_process.loader
    if current.order is None:
        order: ItemOrder | LoaderOrder
        if any(gather(isinstance(loader, DataLoader))):
            order = ItemOrder(current, loader)
        else:
            order = on_all_ranks(lambda: LoaderOrder(current, loader))
        if of_this_process is not None:
            of_this_process.batches = order.batches
        current.order = order
        after_data_is_built(current)
    else:
        there = current.order
        has_one = isinstance(there, ItemOrder | LoaderOrder) and there.batches is not None
        on_all_ranks(lambda: _check_first(loader, has_one=has_one))
    return result


def _check_first(loader: Any, *, has_one: bool) -> None:
    """Refuse a loader for a later chunk of a virtual pipeline.

    Args:
        loader: what the provider made for this chunk; None: nothing.
        has_one: whether it made one for the first chunk.
    """
    if loader is None:
        return
    if has_one:
        raise UsageError(
            "this process has two training loaders",
            found="a provider that makes one for every virtual-pipeline chunk",
            expected="one, where vp_stage is 0, on a process that sends its batches to the chunks that need them",
            action="return None where vp_stage is not 0",
        )
    raise UsageError(
        "a training loader is not that of the first chunk",
        found="a provider that makes one for a later virtual-pipeline chunk, and None for the first",
        expected="one, where vp_stage is 0, on a process that sends its batches to the chunks that need them",
        action="return None where vp_stage is not 0, and the loader where it is; or train on a data.yaml "
        "(--megaresume-data)",
    )


def _check_state(current: MegatronHost) -> None:
    args, loaded = current.args, current.loaded
    position = int(args.consumed_train_samples)
    if position and (loaded is None or loaded.kind == "order" or loaded.samples != position):
        has = "none" if loaded is None else f"{loaded.kind}, sample {loaded.samples}"
        raise StateError(
            "training continues, but no state of the loader belongs to its position",
            found=f"iteration {args.iteration}, {position} samples trained; state in the checkpoint: {has}",
            expected=f"the states of all loaders after sample {position}",
            cause="it was saved without megaresume or with another --dataloader-type; or the counter was overridden",
            action=f"start the data over: {BEGIN_ANEW}; or load a checkpoint that has them: megaresume inspect DIR",
        )
