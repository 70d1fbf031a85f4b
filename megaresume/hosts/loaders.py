"""Third-party loaders, attached to DeepSpeed and Megatron: their states become part of the checkpoint.

    data = megaresume.attach(engine, loader)                DeepSpeed
    provider = megaresume.provider(base_provider)            Megatron, --dataloader-type external

Supports anything with ``save_state_rank`` / ``restore_state_rank`` (Energon's ``SavableDataLoader``) or ``state_dict``
/ ``load_state_dict`` (such as torchdata's ``StatefulDataLoader``). The loader determines the order of the samples. We
ensure that the state belongs to the *trained* batches, that every data-parallel rank's state is committed with the
checkpoint or not at all, and that it is restored on every replica or refused:
`megaresume.hosts.loader_states`.

This module has one class for each kind of loader: its facts, and how its state is taken and restored.

    loader  --adapter_of-->  Adapter:  facts()   workers and batch size, on which the state depends
                                       save()    the state after the last batch that was handed out
                                       restore() before the first batch
                                       batches() an iterator, requested once per epoch

States are objects of the loader's own library; they are pickled, as there is no other format for them (Energon's are
classes, which ``torch.load`` refuses by default since torch 2.6).

`LoaderReader`: the batches of a loader, without end, and its state at the last *trained* one.

A loader's state is that after the batch that it handed out last. A training loop may have batches that it has not
trained yet (it reads ahead, or saves in the middle of a step), and those must come again after a resume:

    handed out  0 ─────────── s ──────────── t ─────── h
                              │              │         └ the position of the loader
                              │              └ trained: the position for the checkpoint
                              └ the last state that was taken at or before t

    nothing ahead (t = h):   the state is taken now
    otherwise:               the state taken at s, and "skip t - s batches": they are read again and dropped

States are taken every `SNAPSHOT_EVERY` batches, so that t - s stays small, and after the very first batch: one cannot
skip batches from the beginning, as a loader may begin with an order that it draws itself.
"""

from __future__ import annotations

import importlib.metadata
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megaresume.checkpoint.generators import kept
from megaresume.hosts.loader_order import check_order, streaming_of
from megaresume.stream.errors import StateError, UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderFacts:
    """Settings on which a loader's state depends."""

    #: energon, or state_dict.
    kind: str
    #: its library and version, for people.
    library: str
    #: worker processes per data-parallel rank.
    workers: int
    #: samples in a batch; None if unknown.
    batch_size: int | None


class Adapter(Protocol):
    """The interface to one loader."""

    def facts(self) -> LoaderFacts:
        """The settings on which its state depends."""

    def save(self, handed: int, epoch: int) -> Any:
        """The state after the last batch.

        Args:
            handed: batches handed out since the beginning of the run.
            epoch: number of finished passes over the loader.
        """

    def restore(self, state: Any, handed: int, epoch: int) -> None:
        """Restore a state, before the first batch of this process."""

    def batches(self, epoch: int, *, is_restored: bool = False) -> Iterator[Any]:
        """The batches up to the end of an epoch; a later call continues with the next.

        Args:
            epoch: number of finished passes over the loader.
            is_restored: whether this is the first call since `restore`.
        """


def adapter_of(loader: Any) -> Adapter:
    """Recognise the kind of a loader by its methods.

    Raises:
        UsageError: it can neither save nor restore a state, or is known to lose its order.
    """
    if all(hasattr(loader, name) for name in ("save_state_rank", "restore_state_rank", "worker_config")):
        return EnergonAdapter(loader)
    if all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict", "__iter__")):
        check_order(loader)
        return StateDictAdapter(loader)
    dataset = getattr(loader, "dataset", loader)  # passed directly, or in a loader of torch's or DeepSpeed's
    if all(hasattr(dataset, name) for name in ("__getitem__", "__len__")):
        name = "DATASET" if dataset is loader else "LOADER.dataset"
        action = (
            f"megaresume.DataLoader({name}, ...) in its place; for an engine with "
            "engine.train_micro_batch_size_per_gpu() and accumulation=engine.gradient_accumulation_steps()"
        )
    else:
        action = (
            "torchdata.stateful_dataloader.StatefulDataLoader instead of torch.utils.data.DataLoader, "
            "megatron.energon.get_savable_loader instead of get_loader; or a data.yaml"
        )
    raise UsageError(
        "this loader has no state that could be saved",
        found=f"{type(loader).__module__}.{type(loader).__name__}",
        expected="a megaresume.DataLoader; Energon's get_savable_loader(...), torchdata's StatefulDataLoader(...), or "
        "any iterable with state_dict and load_state_dict",
        cause="a plain torch DataLoader forgets its position" if hasattr(loader, "batch_sampler") else None,
        action=action,
    )


def _library(loader: Any) -> str:
    package = type(loader).__module__.partition(".")[0]
    names = {"megatron": "megatron-energon"}
    try:
        return f"{names.get(package, package)} {importlib.metadata.version(names.get(package, package))}"
    except importlib.metadata.PackageNotFoundError:
        return f"{type(loader).__module__}.{type(loader).__qualname__}"


class StateDictAdapter:
    """``state_dict`` and ``load_state_dict`` as torchdata defines them: the state after the batch handed out last.

    Torchdata 0.11 draws a seed from the loader's generator when an epoch begins, but not when one is resumed: without
    workers, the shuffle of the epoch *after* a resume would change. So the generator's own state is saved as well.

    A streaming dataset of Hugging Face's begins each of its passes at the restored position. So that is cleared after
    the first one.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._generator: Any = None

    def facts(self) -> LoaderFacts:
        """See `Adapter`."""
        size = getattr(self.loader, "batch_size", None)
        if size is None:  # torchdata takes it from a batch_sampler
            size = getattr(getattr(self.loader, "batch_sampler", None), "batch_size", None)
        return LoaderFacts(
            kind="state_dict",
            library=_library(self.loader),
            workers=int(getattr(self.loader, "num_workers", 0)),
            batch_size=None if size is None else int(size),
        )

    def save(self, handed: int, epoch: int) -> Any:
        """See `Adapter`."""
        generator: Any = getattr(self.loader, "generator", None)
        own = generator is not None and getattr(self.loader, "num_workers", 0) == 0
        return {"loader": self.loader.state_dict(), "generator": generator.get_state() if own else None}

    def restore(self, state: Any, handed: int, epoch: int) -> None:
        """See `Adapter`."""
        self._set_epoch(epoch)
        self.loader.load_state_dict(state["loader"])
        self._generator = state["generator"]

    def batches(self, epoch: int, *, is_restored: bool = False) -> Iterator[Any]:
        """See `Adapter`."""
        self._set_epoch(epoch)
        if not is_restored and (streaming := streaming_of(self.loader)) is not None:
            streaming.load_state_dict(None)
        batches: Iterator[Any] = iter(self.loader)
        if self._generator is not None:  # after the draws of the new iterator
            self.loader.generator.set_state(self._generator)
            self._generator = None
        return batches

    def _set_epoch(self, epoch: int) -> None:
        # A distributed sampler shuffles by the epoch that it is given, which is not in its state. A loader that is its
        # own sampler counts itself: its epochs do not end with a pass over it.
        for name in ("sampler", "batch_sampler"):
            sampler: Any = getattr(self.loader, name, None)
            if sampler is not self.loader and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)


class EnergonAdapter:
    """Energon's ``SavableDataLoader``: ``save_state_rank`` and ``restore_state_rank``.

    Energon 7.4 forgets, for every worker that has handed out nothing since a restore, how many batches of the restored
    state to skip (``_worker_sample_counters``); a second resume soon after the first would then silently repeat and
    skip samples. So the counters are set right after a restore, and every state is compared with our own count of the
    batches before it is used.

    With its first batch, torch draws a seed for its workers, which Energon does not use. An uninterrupted run has drawn
    it long ago, so a restored one takes it from a generator other than the model's.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def facts(self) -> LoaderFacts:
        """See `Adapter`."""
        size = self.loader._get_batch_size() if hasattr(self.loader, "_get_batch_size") else None
        return LoaderFacts(
            kind="energon",
            library=_library(self.loader),
            workers=int(self.loader.worker_config.num_workers),
            batch_size=None if size is None else int(size),
        )

    def save(self, handed: int, epoch: int) -> Any:
        """See `Adapter`.

        Raises:
            StateError: Energon's state is not the one after the last batch.
        """
        state = self.loader.save_state_rank()
        counted = _batches_of(state)
        if counted is not None and counted != handed:
            raise StateError(
                "Energon's state is not the one after the batch that was handed out last",
                found=f"a state after {counted} batches",
                expected=f"a state after {handed} batches",
                cause="the loader was iterated elsewhere too, or another version of Energon counts differently: "
                f"{_library(self.loader)}",
                action="give the loader to megaresume alone; megaresume knows megatron-energon 7.4",
            )
        return state

    def restore(self, state: Any, handed: int, epoch: int) -> None:
        """See `Adapter`."""
        self.loader.restore_state_rank(state)
        if state is not None and self.loader.num_workers > 0:
            self.loader._worker_sample_counters = [_next_index(worker) - 1 for worker in state.worker_states]

    def batches(self, epoch: int, *, is_restored: bool = False) -> Iterator[Any]:
        """See `Adapter`."""
        batches: Iterator[Any] = iter(self.loader)
        return self._going_on(batches) if is_restored else batches

    def _going_on(self, batches: Iterator[Any]) -> Iterator[Any]:
        generator, self.loader.generator = self.loader.generator, torch.Generator()
        try:
            first = next(batches, _END)
        finally:
            self.loader.generator = generator
        if first is not _END:
            yield first
            yield from batches


_END = object()


def _next_index(worker: Any) -> int:
    """The number of the next batch after a restore, as one worker counts."""
    return int(worker.offset) + (0 if worker.state is None else int(worker.state.sample_index))


def _batches_of(state: Any) -> int | None:
    """Batches handed out before a ``SavableDataLoaderState``; None if unknown."""
    if state is None:
        return 0
    workers = state.worker_states
    if all(hasattr(worker, "offset") for worker in workers):
        return sum(_next_index(worker) for worker in workers)
    counts = [worker.get("_sample_index") for worker in workers]
    return None if None in counts else sum(counts)


#: Batches between two states taken without a save. Energon needs about 30 ms for one.
SNAPSHOT_EVERY = 32


class LoaderReader:
    """The loader of one data-parallel rank.

    Args:
        adapter: of the loader.
        trained: returns the number of batches of this loader that optimizer steps have trained since the start of the
            run; never more than were handed out.
    """

    def __init__(self, adapter: Adapter, trained: Callable[[], int]) -> None:
        self.adapter = adapter
        self._trained = trained
        self._batches: Iterator[Any] | None = None
        #: batches handed out, since the start of the run.
        self.handed = 0
        self._epoch = 0
        self._start = 0
        #: whether it is in the middle of a pass that an earlier process began.
        self._is_restored = False
        #: (batches handed out, pickled state there).
        self._snapshots: deque[tuple[int, bytes]] = deque([(0, _pickled(None, 0, 0))])

    def __next__(self) -> Any:
        """The next batch; a loader that ends is restarted.

        Raises:
            UsageError: the loader has no batches at all.
            StateError: the loader cannot continue from its state.
        """
        last = self._snapshots[-1][0]
        if self.handed - last >= (SNAPSHOT_EVERY if last else 1):
            self._snapshots.append((self.handed, self._take()))
            self._forget()
        batch = self._next()
        self.handed += 1
        return batch

    def _next(self) -> Any:
        for _ in range(3):  # a restored iterator may be at the end of its epoch
            if self._batches is None:
                self._batches = self._begin()
            try:
                return next(self._batches)
            except StopIteration:
                self._batches, self._epoch = None, self._epoch + 1
        raise UsageError(
            "the loader has no batches",
            found=f"it ended three times in a row, after {self.handed} batches",
            expected="at least one batch in every pass over it",
            cause="fewer samples than a batch, with drop_last; or it can be iterated only once",
            action="look at the length of its dataset on this rank",
        )

    def _begin(self) -> Iterator[Any]:
        if not self._is_restored:
            return self.adapter.batches(self._epoch)
        self._is_restored = False
        # A DataLoader draws a number when it begins. An uninterrupted run has drawn it long ago.
        try:
            with kept():
                return self.adapter.batches(self._epoch, is_restored=True)
        except StopIteration as error:  # it would end the training loop, as if the data had ended
            raise _not_taken_back(error) from error

    def _take(self) -> bytes:
        if self._batches is None:  # nothing handed out since the beginning, or since a restore
            return self._snapshots[-1][1]
        return _pickled(self.adapter.save(self.handed, self._epoch), self.handed, self._epoch)

    def _forget(self) -> None:
        trained = self._trained()
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= trained:
            self._snapshots.popleft()

    @property
    def is_idle(self) -> bool:
        """Whether steps were trained in this process, but none of their batches came from here."""
        return self.handed == self._start < self._trained()

    def state(self) -> tuple[bytes, int]:
        """The state for exactly the trained batches.

        Returns:
            the pickled state, and the number of batches to skip after it.

        Raises:
            StateError: more batches were trained than were handed out.
        """
        trained = self._trained()
        if trained > self.handed:
            raise StateError(
                "more batches were trained than this loader handed out",
                found=f"{trained} batches trained, {self.handed} handed out",
                expected="every micro-batch from this loader",
                cause="the engine was fed from somewhere else too",
                action="feed it only from what megaresume returned",
            )
        if trained == self.handed and self._snapshots[-1][0] != trained:
            self._snapshots.append((trained, self._take()))
        self._forget()
        at, state = self._snapshots[0]
        return state, trained - at

    def restore(self, pickled: bytes, skip: int) -> None:
        """Resume from the result of `state`; before the first batch.

        Args:
            pickled: the state.
            skip: batches to read and to drop.

        Raises:
            UsageError: batches were already handed out.
            StateError: the loader refuses the state.
        """
        if self._batches is not None:
            raise UsageError(
                "the loader is restored after it has handed out batches",
                found=f"{self.handed} batches handed out",
                expected="a loader at its beginning",
                action="load the checkpoint before the first next(data); to load another one, make a new loader",
            )
        state, handed, epoch = _unpickled(pickled)
        if state is not None:
            try:
                self.adapter.restore(state, handed, epoch)
            except (AssertionError, KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise _not_taken_back(error) from error
        self._is_restored = state is not None
        self.handed, self._epoch = handed, epoch
        self._start = handed + skip
        self._snapshots = deque([(handed, pickled)])
        for _ in range(skip):
            next(self)


def _not_taken_back(error: Exception) -> StateError:
    return StateError(
        "the loader does not take its state back",
        found=f"{type(error).__name__}: {error}".rstrip(": "),
        expected="a loader made with the same arguments over the same dataset",
        cause="the dataset, the sampler or the library was changed between save and resume; or, of torchdata 0.11, "
        "snapshot_every_n_steps is not 1",
        action="make the loader as it was made when the checkpoint was saved; if it was made so, load an earlier one",
    )


def _pickled(state: Any, handed: int, epoch: int) -> bytes:
    return pickle.dumps({"state": state, "handed": handed, "epoch": epoch}, protocol=5)


def _unpickled(data: bytes) -> tuple[Any, int, int]:
    held = pickle.loads(data)
    return held["state"], int(held["handed"]), int(held["epoch"])
