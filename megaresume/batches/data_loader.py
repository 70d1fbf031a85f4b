"""`DataLoader`: any map-style dataset in the exact order of a stream, in the place of torch's ``DataLoader``.

    loader = megaresume.DataLoader(dataset, batch_size=8, collate_fn=collate, num_workers=4)
    for epoch in range(loader.epoch, 3):
        for batch in loader:
            ...
            checkpoint["data"] = loader.state_dict()

Batches are planned in the training process, for all ranks alike; torch's own ``DataLoader`` reads the items of this
rank. A micro-batch of all ranks is a run of consecutive samples:

    samples  0 ............... W ............... 2W        W = batch_size * ranks
             rank 0 | rank 1 | rank 0 | rank 1 |

so the order knows nothing of ranks, workers or batch sizes, and a state is a number of samples.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data
import xxhash

from megaresume.batches.items import ItemReader, ItemSource, check_map_style
from megaresume.batches.loader import outlive_signals
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.config import Append, OnChange, StreamConfig
from megaresume.stream.errors import StateError, StreamExhausted, UsageError
from megaresume.stream.planning.kernel import DOCUMENT, SOURCE
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream

#: name of the source, if only one dataset is given.
ONLY = "data"
#: samples planned at a time.
BLOCK = 4096
#: options of torch's ``DataLoader`` that would be another order, and what stands in their place.
_REFUSED = {
    "sampler": "the order is the stream's: leave the sampler out; weigh datasets by {name: (dataset, weight)}",
    "batch_sampler": "the order is the stream's: leave it out, and pass batch_size",
    "generator": "the order follows from seed=",
    "in_order": "batches come in the order of the stream",
}

log = logging.getLogger(__name__)


class DataLoader:
    """Batches of one rank, and the state of all ranks.

    Every epoch of a dataset is a new permutation of its items. Batches go on across the end of an epoch, so that none
    is short and no item comes twice or not at all; one ``for`` ends with the first step that reaches the end of the
    epoch. What was handed out counts as trained: a ``for`` that was left goes on where it ended.

    Args:
        dataset: with ``len(dataset)`` and ``dataset[i]``; or several, blended by item: ``{name: (dataset, weight)}``.
        batch_size: items that this rank is given at a time.
        shuffle: True.
        seed: of the order.
        collate_fn: list of items to a batch; default: torch's.
        num_workers, pin_memory, persistent_workers: as of torch's ``DataLoader``.
        drop_last: drop the last step if it is short. Without ``max_epochs`` none is.
        accumulation: micro-batches of an optimizer step: a ``for`` ends with a whole step.
        max_epochs: the end of every dataset, or by name; None: no end. The last batch may then be short, and is dealt
            out evenly.
        append: what a resume does if a dataset has grown: its new items come from the next epoch on
            (``next_epoch``), or mixed into the rest of this one (``now``); None: it is refused.
        on_change: what a resume does if weights or datasets changed: ``refuse`` it, or begin a ``stage`` there.
        dp_rank, dp_size: this rank among the data-parallel ranks; default: those of torch.distributed.
        torch_options: others of torch's ``DataLoader``: timeout, worker_init_fn, prefetch_factor, ...

    Raises:
        UsageError: an IterableDataset, a sampler, ``shuffle=False``, or a step that is larger than the dataset.
        ConfigError: weights or epochs that are none.
    """

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
        dp_rank: int | None = None,
        dp_size: int | None = None,
        **torch_options: Any,
    ) -> None:
        _check_options(torch_options, shuffle=shuffle)
        datasets = _named(dataset)
        self.dataset, self.batch_size, self.num_workers = dataset, _count("batch_size", batch_size), num_workers
        self.drop_last, self.accumulation = drop_last, _count("accumulation", accumulation)
        distributed = dist.is_available() and dist.is_initialized()
        self.dp_rank = (dist.get_rank() if distributed else 0) if dp_rank is None else dp_rank
        self.dp_size = (dist.get_world_size() if distributed else 1) if dp_size is None else dp_size
        sources: dict[str, Any] = {}
        for name, (_, weight) in datasets.items():
            epochs = max_epochs.get(name) if isinstance(max_epochs, Mapping) else max_epochs
            sources[name] = {"weight": weight, "max_epochs": epochs, "append": append}
        config = {"seed": seed, "seq_length": 1, "packing": "none", "blend": {"unit": "documents"}, "sources": sources}
        opened = {name: ItemSource(one, name) for name, (one, _) in datasets.items()}
        self._items = sum(len(source) for source in opened.values())
        if self.step_samples > self._items:
            raise UsageError(
                "a step is larger than the dataset",
                found=f"{self.step_samples} items a step ({self.batch_size} * {self.dp_size} ranks * "
                f"{self.accumulation} micro-batches), of {self._items}",
                expected=f"at most {self._items}",
                action="use a smaller batch_size, fewer ranks or fewer micro-batches a step",
            )
        #: the order, for `Stream.plan` and the like.
        self.stream = Stream(StreamConfig.from_dict(config), list(opened.values()), on_change=on_change)
        self.stream.fingerprints  # noqa: B018  reads items: now, not in the middle of the first save
        #: sample with which the run ends, at most; None: no end but those of the datasets.
        self.stop: int | None = None
        self._position = 0
        #: of the ``for`` that runs: only the last one may.
        self._turn: object = None
        self._generator = torch.Generator()
        self._batches = _Batches(self)
        worker_init_fn = torch_options.pop("worker_init_fn", None)
        self._torch = torch.utils.data.DataLoader(
            ItemReader({name: one for name, (one, _) in datasets.items()}),
            batch_sampler=self._batches,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            worker_init_fn=functools.partial(_begin_worker, worker_init_fn) if num_workers else None,
            # It draws the workers' seeds. From the global generator, they would change the dropout of the model.
            generator=self._generator,
            **torch_options,
        )

    @property
    def origin(self) -> dict[str, Any]:
        """A data config of the same order, for questions about the run: it knows the items by their numbers."""
        mapping = self.stream.config.to_dict()
        for name, fingerprint in self.stream.fingerprints.items():
            mapping["sources"][name] |= {"kind": "items", "items": fingerprint.documents}
            if fingerprint.contents is not None:
                mapping["sources"][name]["contents"] = fingerprint.contents
        return mapping

    @property
    def step_samples(self) -> int:
        """Samples of one step, all ranks and micro-batches together."""
        return self.batch_size * self.dp_size * self.accumulation

    @property
    def samples(self) -> int:
        """Samples handed out since the start of the run, all ranks together."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0. Of a blend: as many samples as all datasets together have items."""
        return self._epoch_and_end()[0]

    def _epoch_and_end(self) -> tuple[int, int]:
        """The epoch of the next sample, and the sample with which the one after it begins."""
        cursors = list(self.stream.fields_at(self._position)["sources"].values())
        if len(cursors) == 1:
            return cursors[0].epoch, self._position + cursors[0].left
        epoch = self._position // self._items
        return epoch, (epoch + 1) * self._items

    @property
    def epoch_end(self) -> int:
        """The sample with which the epoch after that of the next sample begins."""
        return self._epoch_and_end()[1]

    @property
    def items(self) -> int:
        """Items of all datasets together."""
        return self._items

    def set_epoch(self, epoch: int) -> None:
        """What a loop calls before each epoch; the loader counts by itself, and checks that it counts alike.

        Raises:
            UsageError: the next sample is of another epoch.
        """
        if epoch != self.epoch:
            raise UsageError(
                f"epoch {epoch} is not the one that comes next",
                found=f"set_epoch({epoch}), with the next sample ({self._position}) in epoch {self.epoch}",
                expected=f"set_epoch({self.epoch})",
                cause="the loop begins at another epoch than the state that was loaded, or a for was left early",
                action="for epoch in range(loader.epoch, EPOCHS): after load_state_dict",
            )

    def __len__(self) -> int:
        """Batches of an epoch, rounded up to whole steps; one epoch may have a step fewer."""
        return -(-self._items // self.step_samples) * self.accumulation

    def state_dict(self) -> dict[str, Any]:
        """The state after the batches handed out so far: plain JSON, a few kilobytes, the same on every rank."""
        return self.state_at(self._position).to_dict()

    def state_at(self, sample: int) -> StreamState:
        """The state before a sample that lies at or after the one loaded."""
        before = self.stream.base_state
        schedule = BatchSchedule.constant(self.step_samples)
        if before is not None:
            schedule = schedule.resumed(before.batches, before.samples)
        batches, short = schedule.until(sample), (sample - self.stream.start) % self.step_samples
        if short:  # the last step of a run, or a part of one
            batches = (*schedule.until(sample - short), (sample - short, short))
        return self.stream.state_at(sample, batches=batches)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, on any number of ranks, workers, and items a batch.

        Raises:
            StateError: it is damaged, or of other datasets: naming what differs. The loader stays as it was.
        """
        self.restore(StreamState.from_json(state))

    def restore(self, state: StreamState) -> None:
        """The same, of a state that is read already."""
        self.stream.restore(state)
        self._position, self._turn = self.stream.start, None
        for line in self.stream.accepted:
            log.info("megaresume: %s", line)

    def __iter__(self) -> Iterator[Any]:
        """The batches of this rank, from the next one to the end of the epoch.

        Raises:
            StateError: another ``for`` over this loader, or `load_state_dict`, came between two batches.
            UsageError: ``collate_fn`` gave nothing.
        """
        turn = self._turn = object()
        text = f"{self.stream.config.seed} {self._position}"
        self._generator.manual_seed(xxhash.xxh3_64_intdigest(text.encode()) >> 1)
        for batch in self._torch:
            if self._turn is not turn:
                raise StateError(
                    "the loader was moved while it was being read",
                    found="another for over the same loader, or load_state_dict, between two batches",
                    expected="one for at a time",
                    action="make a second loader for the other loop",
                )
            if batch is None:
                raise UsageError(
                    "collate_fn gave nothing",
                    found=f"None for {self.batch_size} items",
                    expected="a batch of all the items that it was given",
                    cause="it drops items that it cannot use: they would never be trained",
                    action="remove such items from the dataset before training",
                )
            self._position = self._batches.ahead.popleft()
            yield batch


class _Batches:
    """What torch asks for the places of the items of each batch, far ahead of the batches themselves."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        #: where each batch that is on its way ends, in samples.
        self.ahead: deque[int] = deque()

    def __iter__(self) -> Iterator[list[tuple[str, int]]]:
        ahead: deque[int] = deque()
        self.ahead = ahead
        loader = self._loader
        position, (_, stop) = loader.samples, loader._epoch_and_end()
        everybody = loader.batch_size * loader.dp_size
        while position < stop:
            steps = min(-(-(stop - position) // loader.step_samples), max(BLOCK // loader.step_samples, 1))
            wanted = steps * loader.step_samples
            there = self._there(position, wanted if loader.stop is None else min(wanted, loader.stop - position))
            samples = there - there % loader.step_samples if loader.drop_last else there
            table = loader.stream.plan(position, position + samples).table[:, [SOURCE, DOCUMENT]]
            names = [source.name for source in loader.stream.config.sources]
            for first in range(0, samples, everybody):
                size = min(everybody, samples - first)
                if size < loader.dp_size:
                    log.warning(
                        "megaresume: the last %d items of the stream are not trained: there are %d ranks",
                        size,
                        loader.dp_size,
                    )
                    return
                # Evenly: of a whole micro-batch, batch_size each.
                begin, end = (first + size * rank // loader.dp_size for rank in (loader.dp_rank, loader.dp_rank + 1))
                ahead.append(position + first + size)
                yield [(names[source], item) for source, item in table[begin:end].tolist()]
            if there < wanted:
                return
            position += samples

    def _there(self, first: int, wanted: int) -> int:
        """How many of these samples the stream still has."""
        stream = self._loader.stream
        low, high = 0, wanted + 1  # there are low; there are not high
        while high - low > 1:
            middle = wanted if high > wanted else (low + high) // 2
            try:
                stream.plan(first, first + middle)
                low = middle
            except StreamExhausted:
                high = middle
        return low


def _begin_worker(worker_init_fn: Callable[[int], object] | None, worker: int) -> None:
    outlive_signals()
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _named(dataset: Any) -> dict[str, tuple[Any, Any]]:
    """Datasets and weights by name."""
    if not isinstance(dataset, Mapping):
        named = {ONLY: (dataset, 1)}
    else:
        pairs = {name: value for name, value in dataset.items() if isinstance(value, tuple) and len(value) == 2}
        if not dataset or len(pairs) != len(dataset):
            raise UsageError(
                "datasets without weights",
                found=", ".join(f"{name}: {type(value).__name__}" for name, value in dataset.items()) or "no dataset",
                expected="{name: (dataset, weight), ...}",
                action="give each its weight, as in {'web': (web, 3), 'code': (code, 1)}; or pass one dataset alone",
            )
        named = dict(pairs)
    for name, (one, _) in named.items():
        check_map_style(one, name)
    return named


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"bad {name}", found=repr(value), expected="a whole number, at least 1")
    return value


def _check_options(options: Mapping[str, Any], *, shuffle: bool) -> None:
    for name, instead in _REFUSED.items():
        if options.get(name) is not None and not (name == "in_order" and options[name]):
            raise UsageError(
                f"{name} cannot be used with an exact stream",
                found=f"{name}={options[name]!r:.60}",
                expected=f"no {name}",
                action=instead,
            )
    if not shuffle:
        raise UsageError(
            "the stream is always shuffled",
            found="shuffle=False",
            expected="shuffle=True, the default",
            action="use torch.utils.data.DataLoader for data that is read once from front to back, as in validation",
        )
