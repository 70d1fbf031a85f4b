"""`DataLoader`: any map-style dataset in the exact order of a stream, as a replacement for torch's ``DataLoader``.

    loader = megaresume.DataLoader(dataset, batch_size=8, collate_fn=collate, num_workers=4, max_epochs=3)
    for epoch in range(loader.epoch, 3):
        for batch in loader:
            ...
            checkpoint["data"] = loader.state_dict()

Batches are planned in the training process, the same for all ranks; torch's own ``DataLoader`` reads this rank's
items. A sample is an item; with ``seq_length``, as many items as fit. A state is a number of samples.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
import xxhash

from megaresume.batches import item_options
from megaresume.batches.agreement import Agreement
from megaresume.batches.item_batches import Asked, Collated, ItemBatches, warn_of_generators
from megaresume.batches.item_places import ItemEpochs, Places
from megaresume.batches.items import flatten, reader, token_count
from megaresume.batches.rank_loader import RankLoader, data_parallel
from megaresume.batches.workers import Workers
from megaresume.stream.batches import Balance, BatchSchedule
from megaresume.stream.config import OnChange, StreamConfig, resolved
from megaresume.stream.data_yaml import Append, BlendUnit
from megaresume.stream.errors import StateError, UsageError
from megaresume.stream.kernel import DOCUMENT, SOURCE
from megaresume.stream.skips import SkipConfig
from megaresume.stream.source import AbsentSource, LengthSource
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream

log = logging.getLogger(__name__)

_END = object()


class DataLoader(RankLoader):
    """Batches of one rank; the state covers all ranks.

    Every epoch of a dataset is a new permutation of its items. Batches continue across the end of an epoch, so none is
    short and no item is repeated or skipped; one ``for`` ends with the first step that reaches the end of the epoch.
    Batches handed out count as trained: after a ``for`` was left, the next continues where it ended.

    Args:
        dataset: with ``len(dataset)`` and ``dataset[i]``; or several, blended by item: ``{name: (dataset, weight)}``.
        batch_size: samples in each batch of this rank.
        shuffle: True.
        seed: of the order.
        collate_fn: list of items to a batch; default: torch's, or `flatten` with ``seq_length``.
        num_workers, pin_memory, persistent_workers: as in torch's ``DataLoader``.
        drop_last: drop the last step if it is short, which only happens with ``max_epochs``.
        accumulation: micro-batches of an optimizer step: a ``for`` ends with a whole step.
        max_epochs: the end of every dataset, or by name; None for no end. The last batch may then be short, and is
            split evenly over the ranks.
        append: what a resume does if a dataset has grown: its new items come from the next epoch on
            (``next_epoch``), or mixed into the rest of this one (``now``); None: refuse.
        on_change: what a resume does if weights, packing or datasets changed: ``refuse`` it, or begin a ``stage``
            there.
        contents: what a resume does if items were changed on purpose, such as by another transform: it accepts exactly
            this hash of theirs, or by dataset, which the error names.
        seq_length: pack items into samples of this many tokens; None if an item is a sample.
        packing: ``best_fit`` or ``knapsack``, with whole items; ``split``, which cuts them; or as in a data.yaml.
        lengths: tokens of each item: name of a column, a list, or a function of an item; or by dataset. None:
            ``len(item["input_ids"])``, counted once.
        lengths_dir: directory to keep lengths in, so that they are counted once; also for questions about the run.
        blend: what weights count: ``tokens`` or ``documents`` (items). Default: tokens of packed items, else items.
        stages: changes to come, as in a data.yaml: ``[{"from_samples": 10_000, "weights": {"web": 1, "code": 3}}]``.
        skip: what to leave out: ``["80:88"]``, or ``{"samples": [...], "documents": {"data": [17]}}`` (items).
        keyed: seed the generators of Python, NumPy and torch before each item by (seed, dataset, epoch, item), so that
            a dataset that draws random numbers draws the same on any layout and after a resume; and before each call of
            ``collate_fn`` by (seed, first sample). In workers without it: see `item_batches`.
        balance: deal the samples of each step so that all ranks have equal work; None: do not. Needs ``seq_length``.
            With ``accumulation``, a state can then only be taken between steps.
        group_by_length: batches of items of similar lengths, which need little padding: within windows of 50 steps,
            items are sorted by ``lengths``, and steps shuffled. The windows of a run never change.
        dp_rank, dp_size: this rank among the data-parallel ranks; default: those of torch.distributed.
        torch_options: other options of torch's ``DataLoader``: timeout, worker_init_fn, prefetch_factor, ...

    Raises:
        UsageError: an IterableDataset, a sampler, ``shuffle=False``, a step that is larger than the dataset, or lengths
            that are invalid.
        ConfigError: invalid weights or epochs, or an item that is longer than a sample and must not be cut.
        CorpusError: an item whose tokens cannot be counted.
    """

    _unit = "items"

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        drop_last: bool = False,
        accumulation: int = 1,
        max_epochs: int | Mapping[str, int] | None = None,
        append: Append | None = None,
        on_change: OnChange = "refuse",
        contents: str | Mapping[str, str] | None = None,
        seq_length: int | None = None,
        packing: str | Mapping[str, Any] = "best_fit",
        lengths: Any = None,
        lengths_dir: str | Path | None = None,
        blend: BlendUnit | None = None,
        stages: Sequence[Mapping[str, Any]] = (),
        skip: Any = None,
        keyed: bool = False,
        balance: Balance | None = None,
        group_by_length: bool = False,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        **torch_options: Any,
    ) -> None:
        item_options.check_torch_options(torch_options, shuffle=shuffle)
        named = item_options.named(dataset)
        self._dataset = dataset
        self._accumulation = item_options.count("accumulation", accumulation)
        ranks = data_parallel(dp_rank, dp_size)
        step = item_options.count("batch_size", batch_size) * ranks.size * accumulation
        schedule = BatchSchedule.constant(step)
        self._packing = item_options.Packing(seq_length=seq_length, how=packing, groups=group_by_length)
        item_options.check_packing(self._packing, lengths, list(named))
        item_options.check_balance(balance, self._packing)
        item_options.check_contents(contents, list(named))
        of_each = item_options.by_name(lengths, named)
        directory = None if lengths_dir is None else Path(lengths_dir)
        sources = item_options.sources_of(named, of_each, self._packing, directory=directory, num_workers=num_workers)
        #: samples in one epoch of all datasets: their items; if these are packed, an estimate.
        self.items = item_options.samples_of(
            sources, self._packing, batch_size=batch_size, dp_size=ranks.size, accumulation=accumulation
        )
        config = item_options.config_of(
            named,
            self._packing,
            seed=seed,
            blend=blend,
            max_epochs=max_epochs,
            append=append,
            stages=stages,
            keyed=keyed,
            group=item_options.windows_of(self.items, step) if group_by_length else None,
        )
        self._config = StreamConfig.from_dict(config)
        super().__init__(
            Stream(self._config, list(sources.values()), on_change=on_change),
            schedule,
            micro_batch_size=batch_size,
            ranks=ranks,
            balance=balance,
            num_workers=num_workers,
            at_end="drop" if drop_last else "deal",
        )
        self._sources = sources
        item_options.accept(contents, sources)
        self.stream.fingerprints  # noqa: B018  reads items: now, not in the middle of the first save
        self.stream.schedule = schedule
        if asked := SkipConfig.from_dict(skip, list(named), "skip="):
            self.stream.skip(asked)
        self._position = 0
        #: whether a trainer, and not the loop over this, decides when the run ends.
        self.ends_elsewhere = False
        #: whether a trainer compares the loaders of all ranks.
        self.is_compared = False
        self._agreement = Agreement()
        #: the epoch of the state that was loaded; whether the loop has asked for it; whether the next ``for`` is empty.
        self._resumed_epoch, self._was_asked, self._is_passed = 0, False, False
        #: number of the current ``for``: only the last one may continue.
        self._turn: object = None
        #: where each batch in flight ends, in samples, and how many items it has.
        self._ahead: deque[tuple[int, int]] = deque()
        packed = seq_length is not None
        self._epochs = ItemEpochs(self.stream, self.items, item_by_item=not packed)
        self._places = Places(self, self._epochs, sources, whole_rows=packed or keyed)
        self._collated = Collated(row_by_item=not packed)
        measures = {name: one if callable(one) else token_count for name, one in of_each.items()}
        if collate_fn is not None:
            warn_of_generators(collate_fn)
        self._batches = ItemBatches(
            reader({name: one for name, (one, _) in named.items()}, measures if packed else None, keyed=keyed),
            collate_fn or (flatten if packed else torch.utils.data.default_collate),
            seed=self._config.seed,
            keyed=keyed,
        )
        self._workers = Workers(
            self._batches,
            self._asked,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            **torch_options,
        )

    def made_by(self, call: str, *, takes_contents: bool = False) -> DataLoader:
        """Mark the loader as made by a trainer, so that errors name the user's call, ``megaresume.attach``, and its
        ``contents=`` only if it takes that."""
        self.ends_elsewhere = self.is_compared = True
        for source in self._sources.values():
            source.call, source.takes_contents = call, takes_contents
        return self

    @property
    def origin(self) -> dict[str, Any] | None:
        """A data config of the same order, for questions about the run, with items by number.

        None if items are packed or grouped, and their lengths are in no file.
        """
        mapping = self.stream.config.to_dict()
        for (name, fingerprint), source in zip(self.stream.fingerprints.items(), self._sources.values(), strict=True):
            mapping["sources"][name] |= {"kind": "items", "items": fingerprint.documents}
            if source.kept is not None:
                mapping["sources"][name]["lengths"] = os.path.abspath(source.kept)
            elif self._packing.seq_length is not None or self._packing.groups:
                return None
            if fingerprint.contents is not None:
                mapping["sources"][name]["contents"] = fingerprint.contents
        return mapping

    @property
    def collates(self) -> bool:
        """Whether a ``collate_fn`` was given."""
        return self._batches.collate_fn not in (flatten, torch.utils.data.default_collate)

    @property
    def is_packed(self) -> bool:
        """Whether a sample is several items, or a part of one."""
        return self._packing.seq_length is not None

    def as_recorded(self, state: StreamState) -> Stream:
        """The order that a state was taken from, over the same datasets, whatever was appended or changed since.

        Raises:
            StateError: its items have changed.
        """
        today = (source.name for source in resolved(self._config, state.config["sources"]).sources)
        sources = dict(zip(today, self._sources.values(), strict=True))
        config = StreamConfig.recorded(state.config)
        here: list[LengthSource] = [
            sources[name].first(state.fingerprints[name].documents) if name in sources else AbsentSource(name, state)
            for name in (source.name for source in config.sources)
        ]
        return Stream(config, here, state=state)

    def places(self, first: int, stop: int, stream: Stream) -> list[tuple[int, int, str, Any]]:
        """Find the items of samples, in an order in which each sample is one: (epoch, item, dataset, place), for
        `read`.

        Raises:
            CorpusError: it draws from a dataset that was removed.
        """
        plan = stream.plan(first, stop)
        labels = [source.label for source in stream.config.sources]
        names = [labels[source] for source in plan.table[:, SOURCE].tolist()]
        epochs, items = plan.epochs().tolist(), plan.table[:, DOCUMENT].tolist()
        return list(zip(epochs, items, names, self._places.of(plan, stream), strict=True))

    def read(self, places: list[Any]) -> list[Any]:
        """The items of some places."""
        return self._batches.read(places)

    @property
    def dataset(self) -> Any:
        """The dataset as given; it cannot be replaced."""
        return self._dataset

    @property
    def accumulation(self) -> int:
        """Micro-batches of an optimizer step."""
        return self._accumulation

    @property
    def batch_size(self) -> int:
        """The number of samples in a micro-batch of this rank."""
        return self.micro_batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a short last step is dropped."""
        return self.at_end == "drop"

    @property
    def layout(self) -> str:
        """How samples are divided into steps and micro-batches, and where it continues: the same on every rank."""
        return (
            f"batch_size={self.batch_size}, accumulation={self.accumulation}, drop_last={self.drop_last}, "
            f"balance={self.balance}, samples {self.samples} to {self.stop}"
        )

    @property
    def step_samples(self) -> int:
        """Samples in one step, over all ranks and micro-batches, from `schedule`, which a trainer may set."""
        return self.schedule.size_at(0)

    @property
    def samples(self) -> int:
        """Samples handed out since the start of the run, over all ranks."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0. In a blend, an epoch is as many samples as all datasets together."""
        self._was_asked = True
        return self._epochs.of(self._position)

    @property
    def epoch_end(self) -> int:
        """The first sample of the epoch after the next sample's."""
        return self._epochs.end_from(self._position)

    def epoch_ends(self) -> Iterator[int]:
        """The samples at which this epoch and each later one end; the last is the end of the data."""
        return self._epochs.ends(self._position)

    @property
    def sampler(self) -> DataLoader:
        """Itself, for loops that call ``loader.sampler.set_epoch(epoch)``."""
        return self

    @property
    def batch_sampler(self) -> None:
        """None, for code that asks a loader for its sampler (as Lightning does)."""

    def set_epoch(self, epoch: int) -> None:
        """Called by loops before each epoch; the loader counts by itself, and checks that the loop agrees.

        After `load_state_dict`, a loop may begin at epoch 0 again: the ``for`` of each epoch that is already trained
        is empty.

        Raises:
            UsageError: the next sample is of another epoch.
        """
        now = self.epoch
        self._is_passed = epoch < min(self._resumed_epoch, now)
        if self._is_passed:
            log.info("megaresume: epoch %d was trained before the state was saved: passed over", epoch)
        elif epoch != now:
            raise UsageError(
                f"epoch {epoch} is not the next one",
                found=f"set_epoch({epoch}), with the next sample ({self._position}) in epoch {now}",
                expected=f"set_epoch({now})",
                cause="the loop begins at another epoch than the state that was loaded, or a for was left early",
                action="for epoch in range(loader.epoch, EPOCHS): after load_state_dict",
            )

    def __copy__(self) -> DataLoader:
        """Another loader of the same datasets, which continues independently from the same sample."""
        return copy.deepcopy(self, {id(one): one for one, _ in item_options.named(self.dataset).values()})

    def __len__(self) -> int:
        """Batches of an epoch, rounded up to whole steps; one epoch may have a step fewer."""
        return -(-self.items // self.step_samples) * self.accumulation

    def state_dict(self) -> dict[str, Any]:
        """The state after the batches handed out so far: plain JSON, a few kilobytes, the same on every rank."""
        return self.state_at(self._position).to_dict()

    def _repr_html_(self) -> str:
        """How far the loader is, for Jupyter."""
        from megaresume.stream.pictures import picture_of_state

        return picture_of_state(self.stream.state_at(self._position))

    def state_at(self, sample: int) -> StreamState:
        """The state before a sample, which must not lie before the one loaded.

        Raises:
            StateError: the samples of the step are balanced, and it is half trained; or the ranks have changed since
                the loader was made.
        """
        self.ranks.check()
        schedule = self.stream.schedule
        assert schedule is not None
        batches, short = schedule.until(sample), (sample - self.stream.start) % self.step_samples
        if short and self.balance is not None and (self.drop_last or self.has_batches_at(sample)):
            raise StateError(
                "there is no state inside a step with balanced ranks",
                found=f"sample {sample}, {short} samples after the beginning of a step of {self.step_samples}",
                expected="a state after the last micro-batch of a step",
                cause="the samples of a step are dealt out in another order than that of the stream",
                action="take the state after the optimizer step; or leave out balance or accumulation",
            )
        if short:  # the last step of a run, or a part of one
            batches = (*schedule.until(sample - short), (sample - short, short))
        return self.stream.state_at(sample, batches=batches)

    def has_batches_at(self, sample: int) -> bool:
        """Whether every rank has a micro-batch at this sample; with ``drop_last``, whether a step begins there."""
        wanted = self.step_samples if self.drop_last else self.dp_size
        if self.stop is not None and sample + wanted > self.stop:
            return False
        return self.stream.reaches(sample + wanted)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `state_dict`, with any number of ranks, workers, and items per batch.

        Raises:
            StateError: it is damaged, or of other datasets, naming what differs. The loader is unchanged.
        """
        self.restore(StreamState.from_json(state))

    def restore(self, state: StreamState) -> None:
        """Continue from a state that was parsed already."""
        item_options.check_packed_before(self._packing, int(state.config["seq_length"]))
        self.stream.restore(state)
        schedule = BatchSchedule.constant(self.step_samples)
        self.stream.schedule = schedule.resumed(state.batches, state.samples)
        self._position, self._turn = self.stream.start, None
        self._epochs.forget()
        self._resumed_epoch, self._was_asked, self._is_passed = self._epochs.of(self._position), False, False
        for line in self.stream.accepted:
            log.info("megaresume: %s", line)

    def rewind(self, sample: int) -> None:
        """Hand out samples again from this one on: no batch since then was trained. Ends a running ``for``.

        Args:
            sample: the first of a step; not before the state that was loaded.
        """
        self._position, self._turn = sample, None

    def __iter__(self) -> Iterator[Any]:
        """The batches of this rank, from the next one to the end of the epoch; none if `set_epoch` named an epoch that
        is already trained.

        Raises:
            StateError: another ``for`` over this loader, or `load_state_dict`, came between two batches; or the ranks
                changed since the loader was made, or differ in their data or position: `Agreement`.
            UsageError: ``collate_fn`` returned None.
        """
        self.ranks.check()
        if self._is_passed:
            self._is_passed = False
            return
        compares = self.ranks.is_default and self.dp_size > 1 and not self.is_compared
        if compares:
            self._agreement.check(self.stream, self.layout, self._position, continues=self._turn is not None)
        self._warn_of_epochs()
        turn = self._turn = object()
        text = f"{self.stream.config.seed} {self._position}"
        self._workers.generator.manual_seed(xxhash.xxh3_64_intdigest(text.encode()) >> 1)
        batches = self._read()
        for number in itertools.count():
            # Check before taking a batch, too: persistent workers would lose it for the other loop.
            self._check_turn(turn)
            batch = next(batches, _END)
            if compares and (batch is _END or (number > 1 and number.bit_count() == 1)):
                self._agreement.check_not_left(self._position)
            if batch is _END:
                return
            self._check_turn(turn)
            end, items = self._ahead.popleft()
            self._collated.check(batch, items)
            self._position = end
            yield batch

    def _check_turn(self, turn: object) -> None:
        if self._turn is not turn:
            raise StateError(
                "the loader was moved while it was being read",
                found="another for over the same loader, or load_state_dict, between two batches",
                expected="one for at a time",
                action="make a second loader for the other loop",
            )

    def _warn_of_epochs(self) -> None:
        """Warn once after a resume if the loop never asks for its epoch: it would train all epochs again."""
        is_open = self.stop is None and all(source.max_epochs is None for source in self.stream.config.sources)
        if self._resumed_epoch and is_open and not (self._was_asked or self.ends_elsewhere):
            self._was_asked = True
            log.warning(
                "megaresume: the run continues in epoch %d, and the loop did not ask in which: `for epoch in "
                "range(EPOCHS)` would train EPOCHS more. Write range(loader.epoch, EPOCHS), or make the loader with "
                "max_epochs=EPOCHS",
                self._resumed_epoch,
            )

    def _asked(self) -> Iterator[Asked]:
        """The samples of each batch of a ``for``."""
        step_start = self._position
        if self.balance is not None:
            step_start -= (self._position - self.stream.start) % self.step_samples
        self._ahead = deque()
        return self._places.to_epoch_end(self._position, step_start, self._ahead)

    def _from_workers(self) -> Iterator[Any]:
        return iter(self._workers)

    def _in_process(self) -> Iterator[Any]:
        if self._workers.torch.pin_memory:
            yield from self._workers
            return
        # What torch does without workers, except its profiler marks, which take 5 us per batch.
        for asked in self._asked():
            yield self._batches.__getitems__(asked)

    def _say_left_over(self, left: int, step: int) -> None:
        # Where the run says beforehand with which sample it ends, it has said this as well.
        if self.stop is None and not self.drop_last:
            super()._say_left_over(left, step)
