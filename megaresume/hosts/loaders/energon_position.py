"""Which records of a data set an Energon run has handed out, and which it has not: from its states.

    states of all ranks  --every worker, one after another-->  Energon's own data set, restored
                         --offset batches read and dropped-->  exactly what was handed out
                         --look-->   slices still to be read, records that wait in shuffle and packing buffers

A worker owns a range of the records and reads it slice by slice, pass after pass; what lies in its buffers was read and
not handed out. So of each worker: handed out in this pass = its range - slices to come - buffers. At the beginning of a
pass its buffers still hold records of the pass before: those are *owed*. Read against megatron-energon 7.4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.stream.errors import StateError, UsageError

Int64Array = npt.NDArray[np.int64]

#: ``(rank, world_size, num_workers) -> SavableDataLoader``: the loader of the run, made as the run made it.
Factory = Callable[[int, int, int], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPosition:
    """One worker's part of the data set."""

    rank: int
    worker: int
    #: [first, stop) of the records that are its own.
    own: tuple[int, int]
    #: the pass over them that it reads, from 0.
    epoch: int
    #: int64: records handed out in this pass.
    handed: Int64Array
    #: int64: records of the pass before that wait in its buffers still.
    owed: Int64Array
    #: records of which a part was handed out: a generator in the task encoder was in the middle of them.
    in_part: int

    @property
    def begun(self) -> int:
        """The pass of the record that it hands out next at the latest."""
        return self.epoch - (len(self.owed) > 0)

    def handed_in(self, epoch: int) -> Int64Array:
        """Records that it handed out in a pass."""
        if epoch == self.epoch:
            return self.handed
        if epoch > self.epoch:
            return np.zeros(0, np.int64)
        own = np.arange(*self.own, dtype=np.int64)
        return np.setdiff1d(own, self.owed) if epoch == self.epoch - 1 else own


@dataclass(frozen=True, kw_only=True, slots=True)
class EnergonPosition:
    """Where a run stands."""

    #: of the data set, in Energon's own order: its shards, one after another.
    records: int
    #: of each worker, rank by rank.
    workers: tuple[WorkerPosition, ...]
    #: keys of a few records by number, to compare with another index of the same shards.
    keys: dict[int, str]
    #: what cannot be carried over exactly: sentences, with numbers.
    inexact: tuple[str, ...]

    @property
    def epoch(self) -> int:
        """The pass that is going on: the earliest of which a record is to come."""
        return min(worker.begun for worker in self.workers)

    def handed(self) -> Int64Array:
        """Records handed out in that pass, ascending."""
        found = [worker.handed_in(self.epoch) for worker in self.workers]
        return np.unique(np.concatenate([*found, np.zeros(0, np.int64)]))


def position_of(states: Sequence[Any], factory: Factory) -> EnergonPosition:
    """Find out where a run stands. Reads and decodes what its states ask for; needs the run's own task encoder.

    Args:
        states: `SavableDataLoaderState` of every data-parallel rank, in order.
        factory: makes the run's loader.

    Raises:
        StateError: the loader is not the one that the states are of.
        UsageError: the data is a blend, or no webdataset at all.
    """
    workers: list[WorkerPosition] = []
    records, keys, inexact = 0, {}, []
    num_workers = len(states[0].worker_states)
    is_served = all(hasattr(state, "offset") for state in states[0].worker_states)
    for rank, state in enumerate(states):
        loader = factory(rank, len(states), num_workers if is_served else 0)
        for worker, saved in enumerate(state.worker_states):
            dataset = loader.dataset.dataset
            leaf = _leaf(dataset)
            _as_worker(worker, num_workers if is_served else 0)
            try:
                _go_to(loader, saved, is_served)
                found, sentences = _look(dataset, leaf, rank, worker)
            except (AssertionError, KeyError, IndexError, TypeError, AttributeError) as error:
                raise StateError(
                    "the loader does not take the states back",
                    found=f"rank {rank}, worker {worker}: {type(error).__name__}: {error}".rstrip(": "),
                    expected="the loader of the run, made with the same arguments",
                    cause="the factory passes other arguments than the run did, or the data set has changed",
                    action="make the loader in the factory exactly as the training script does",
                ) from error
            finally:
                _as_worker(None, 0)
            workers.append(found)
            inexact += [s for s in sentences if s not in inexact]
            loader = factory(rank, len(states), num_workers if is_served else 0) if worker + 1 < num_workers else loader
        records = max(len(leaf.join_readers[0]), records)
        for record in np.unique(np.linspace(0, records - 1, 16).astype(int)):
            sample = leaf.join_readers[0][int(record)]
            if hasattr(sample, "get") or isinstance(sample, dict):
                keys[int(record)] = str(sample["__key__"])
    position = EnergonPosition(records=records, workers=tuple(workers), keys=keys, inexact=tuple(inexact))
    return EnergonPosition(records=records, workers=tuple(workers), keys=keys, inexact=(*inexact, *_mixed(position)))


def _mixed(position: EnergonPosition) -> Iterator[str]:
    """What follows from workers that are not in the same pass."""
    later = range(position.epoch + 1, max(worker.epoch for worker in position.workers) + 1)
    repeated = sum(len(worker.handed_in(epoch)) for worker in position.workers for epoch in later)
    if repeated:
        yield (
            f"the workers had not all come to the same pass: {repeated} records that were handed out in epoch "
            f"{later[0]} already, while epoch {position.epoch} was not over, will come again in it"
        )
    in_part = sum(worker.in_part for worker in position.workers)
    if in_part:
        yield f"{in_part} records were handed out in part by a generator: they count as handed out"


def _leaf(dataset: Any) -> Any:
    from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset

    leaves = [d for d in _walk(dataset) if isinstance(d, WebdatasetSampleLoaderDataset)]
    if len(leaves) != 1:
        raise UsageError(
            "only runs over one webdataset can be carried over",
            found=f"{len(leaves)} webdatasets in the loader" + (", a blend" if leaves else ""),
            expected="one directory that Energon has prepared",
            cause="in a blend Energon's buffers hold records of several data sets at once",
            action="begin every data set anew at an epoch; or go on with Energon: megaresume.attach(engine, loader)",
        )
    return leaves[0]


def _walk(dataset: Any) -> Iterator[Any]:
    yield dataset
    for inner in getattr(dataset, "datasets", ()):
        yield from _walk(inner)


def _within(dataset: Any) -> Any:
    """Without the wrappers that watch over a worker process, which this is not."""
    while type(dataset).__name__ in ("GcDataset", "WatchdogDataset"):
        dataset = dataset.dataset
    return dataset


def _as_worker(worker: int | None, num_workers: int) -> None:
    """Let this process be one of the loader's workers, or none again."""
    import torch.utils.data._utils.worker as module
    from megatron.energon import WorkerConfig

    WorkerConfig.worker_id_offset = 0
    module._worker_info = (
        None
        if worker is None or num_workers == 0
        else module.WorkerInfo(id=worker, num_workers=num_workers, seed=0, dataset=None)  # type: ignore[arg-type]
    )


def _go_to(loader: Any, saved: Any, is_served: bool) -> None:
    """Restore one worker's data set, and read it up to what was handed out."""
    from megatron.energon.rng import SystemRng

    outer = loader.dataset
    if not is_served:
        outer.restore_state(saved)
        return
    if saved.state is None or saved.state.dataset_state is None:
        outer.dataset.reset_state_deep()
    else:
        outer.dataset.restore_state(saved.state.dataset_state)
        SystemRng.restore_state(saved.state.rng)
    left = int(saved.offset)
    if not left:
        return
    index = 0 if saved.state is None else int(saved.state.sample_index)
    config = outer.worker_config
    batches = iter(_within(outer.dataset))
    # The iterator must outlive the look: when it is dropped, data sets may tidy up.
    loader._megaresume_batches = batches
    for step in range(left):
        config.worker_activate(index + step, cache_pool=outer.cache_pool)
        try:
            next(batches)
        finally:
            config.worker_deactivate()


def _look(dataset: Any, leaf: Any, rank: int, worker: int) -> tuple[WorkerPosition, list[str]]:
    leaf.ensure_slice_offsets()
    offsets = [int(offset) for offset in leaf.slice_offsets]
    own = np.arange(offsets[0], offsets[-1], dtype=np.int64) if len(offsets) > 1 else np.zeros(0, np.int64)
    waiting, in_part = _waiting(dataset)
    to_come = _to_come(leaf, offsets)
    sentences = []
    if leaf.shuffle_over_epochs == -1:
        sentences.append("records are drawn with replacement: there is no set of records that is left of a pass")
    elif (leaf.shuffle_over_epochs or 1) > 1:
        sentences.append(
            f"slices are shuffled over {leaf.shuffle_over_epochs} epochs: a record may have come more than once before "
            "another came at all"
        )
    # What waits was read in this pass, or else in the one before; of two copies of a record, one in each.
    read = np.setdiff1d(own, to_come)
    once = np.unique(np.asarray(waiting, np.int64))
    again = np.asarray([record for record, count in Counter(waiting).items() if count > 1], np.int64)
    position = WorkerPosition(
        rank=rank,
        worker=worker,
        own=(offsets[0], offsets[-1]),
        epoch=int(leaf._epoch_count),
        handed=np.setdiff1d(read, once),
        owed=np.union1d(np.setdiff1d(once, read), again),
        in_part=in_part,
    )
    return position, sentences


def _to_come(leaf: Any, offsets: list[int]) -> Int64Array:
    """Records that the worker has not read in this pass."""
    pending, active = leaf._pending_slice_indexes, leaf._active_slice_state
    if pending is None and all(state is None for state in active):
        return np.arange(offsets[0], offsets[-1], dtype=np.int64)  # the pass has not begun
    ranges = [(offsets[index], offsets[index + 1]) for index in pending or ()]
    ranges += [(int(state.current), offsets[state.index + 1]) for state in active if state is not None]
    return np.unique(np.concatenate([np.zeros(0, np.int64), *(np.arange(a, b, dtype=np.int64) for a, b in ranges)]))


def _waiting(dataset: Any) -> tuple[list[int], int]:
    """Records in the buffers of the wrappers; records that a generator has handed out in part."""
    from megatron.energon.wrappers.buffer import SavableSampleBuffer

    waiting: list[int] = []
    in_part: set[int] = set()
    for wrapper in _walk(dataset):
        for value in vars(wrapper).values():
            buffers = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)
            for buffer in buffers:
                if isinstance(buffer, SavableSampleBuffer):
                    waiting += _records(buffer._restore_keys)
        in_part.update(_records(getattr(wrapper, "_generator_sample_keys", None) or ()))
        in_part.update(_records(getattr(wrapper, "_generator_sample_key", None) or ()))
    return waiting, len(in_part)


def _records(key: Any) -> Iterator[int]:
    """The record numbers in restore keys, which are nested tuples that end in ``"Webdataset", number``."""
    items = list(key)
    for position, item in enumerate(items):
        if isinstance(item, tuple | list):
            yield from _records(item)
        elif item == "Webdataset" and position + 1 < len(items) and isinstance(items[position + 1], int):
            yield items[position + 1]
