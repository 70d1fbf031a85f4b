"""`StreamLoader`: the micro-batches of one rank, in order, for ever.

Sample numbers are computed here, in the consumer's process; what reads the samples is one of

    prefetch thread (the default)   compiled loops that do not hold the GIL: for corpora of tokens nothing is faster
    worker processes                for sources whose ``get`` is slow Python; fork or spawn, any number
    nobody (``prefetch=0``)         on demand, in the consumer's thread

and none of them can change what comes next. Batches that were read ahead are no part of any state. Small micro-batches
of text are read several at once, but for those of workers and in page-locked memory: `Together` in dataset.py.

Worker processes outlive the signals that ask the run to stop.

Slurm sends a job's signals to all of its processes. torch's worker dies of a SIGTERM that is not its parent's, and
the parent of it in the middle of the very save that the signal asked for.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import queue
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch.distributed as dist
import torch.utils.data

from megaresume.batches.ahead import MEMORY, REQUESTS, ReadAhead, use_cache
from megaresume.batches.arrays import FIELDS, Field
from megaresume.batches.batch import Batch
from megaresume.batches.dataset import StreamDataset, Together, whole
from megaresume.batches.items.planned import available
from megaresume.batches.main_guard import check_main_guard
from megaresume.batches.memory import Inbox, Outbox, shown
from megaresume.stream.batches import Balance, BatchSchedule, micro_batches
from megaresume.stream.dealing import deal, deal_in_part, in_parts
from megaresume.stream.errors import MegaresumeError, StateError, StreamExhausted, UsageError
from megaresume.stream.stream import Stream

log = logging.getLogger(__name__)

_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
_listening = False

#: seconds that the end of a program waits for a batch that is being read.
_PATIENCE_AT_EXIT = 30.0


def outlive_signals(_worker: int = 0) -> None:
    """In a worker process: only the parent's own SIGTERM, by which torch clears workers away, ends it.

    May be given to a ``DataLoader`` as ``worker_init_fn``. A second call in one process changes nothing.
    """
    global _listening
    if _listening:
        return
    _listening = True
    parent = os.getppid()
    # Blocked in every thread that begins from here on; delivered to the one that waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    threading.Thread(target=_wait, args=(parent,), name="megaresume-signals", daemon=True).start()


def _wait(parent: int) -> None:
    while True:
        found = signal.sigwaitinfo(_SIGNALS)
        if found.si_signo == signal.SIGTERM and found.si_pid == parent:
            os._exit(0)  # as torch's own handler does


@dataclass(frozen=True, slots=True)
class DataParallel:
    """A rank among the data-parallel ranks.

    Args:
        rank: this one, from 0.
        size: how many there are.
        is_default: whether they are those of torch.distributed, or of a process alone; otherwise they were given.
    """

    rank: int
    size: int
    is_default: bool

    def check(self) -> None:
        """Compare it with the process group of now, which may have been made since, or made again with other ranks.

        Raises:
            StateError: samples would be trained twice, or by nobody.
        """
        now, size = _of_torch()
        if self.is_default and (now, size) != (self.rank, self.size):
            raise StateError(
                "the loader was made for other ranks than there are",
                found=f"rank {now} of {size} in torch.distributed",
                expected=f"rank {self.rank} of {self.size}, as when the loader was made",
                cause="the loader was made before init_process_group, or the process group was made again",
                action="make the loader after init_process_group (and again after a new one, with the state of the "
                "one before), or give it dp_rank and dp_size",
            )
        # With fewer data-parallel ranks than processes (tensor parallelism and the like) only all ranks together know.
        if _has_group() and (self.size > size or (self.size == size and self.rank != now)):
            raise StateError(
                "this is not the data-parallel rank of this process",
                found=f"dp_rank={self.rank}, dp_size={self.size}, in rank {now} of {size} of torch.distributed",
                expected=f"dp_rank={now}, if each of the {size} processes has samples of its own",
                cause="dp_rank is the number on a node (LOCAL_RANK), or one that was written down",
                action="leave both out; with tensor, pipeline or context parallelism, take them from the mesh",
            )


def data_parallel(dp_rank: int | None, dp_size: int | None) -> DataParallel:
    """This rank among the data-parallel ranks: as given; else torch.distributed's, if it is initialised.

    Raises:
        UsageError: there is no such rank; or it was left out in one of several processes that have no group yet.
    """
    is_default = dp_rank is None or dp_size is None
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if is_default and world > 1 and not _has_group():
        raise UsageError(
            "the loader is made before the process group, so it cannot know its rank",
            found=f"WORLD_SIZE={world}, and torch.distributed is not initialised",
            expected="torch.distributed initialised; otherwise every rank would train the same samples",
            action="call torch.distributed.init_process_group (or what does it: deepspeed.initialize, Accelerator()) "
            "before making the loader; or give dp_rank and dp_size",
        )
    own_rank, own_size = _of_torch()
    rank, size = own_rank if dp_rank is None else dp_rank, own_size if dp_size is None else dp_size
    if not 0 <= rank < size:
        raise UsageError(
            "there is no such data-parallel rank",
            found=f"dp_rank={rank}, dp_size={size}",
            expected="dp_rank from 0 to dp_size - 1",
            action="leave both out: they are then torch.distributed's",
        )
    return DataParallel(rank, size, is_default)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _of_torch() -> tuple[int, int]:
    """(rank, ranks) of the default process group; without one there is a single rank."""
    return (dist.get_rank(), dist.get_world_size()) if _has_group() else (0, 1)


#: refuse: raise StreamExhausted; deal: deal out what every rank can be given some of; drop: leave it out.
AtEnd = Literal["refuse", "deal", "drop"]
StartMethod = Literal["fork", "spawn", "forkserver"]


class StreamLoader:
    """Iterates over the micro-batches of one data-parallel rank.

    Args:
        stream: the global stream.
        schedule: global batch sizes by sample.
        micro_batch_size: samples.
        dp_rank, dp_size: this rank among the data-parallel ranks; default: those of torch.distributed.
        start: sample at which the first step begins; a step boundary. Default: where the stream was restored.
        stop: sample at which to end; None: no end.
        num_workers: worker processes; 0: a thread, or none with ``prefetch=0``.
        prefetch: micro-batches read ahead (by each worker).
        start_method: of worker processes; None: Python's default.
        pin_memory: put tensors into page-locked memory, for asynchronous copies to a GPU.
        fields: which of ``labels``, ``loss_mask`` and ``position_ids`` batches hold; a loop that makes them by itself
            saves their time.
        attention_mask: add the document-diagonal mask.
        pad_id: token written where there is no document.
        balance: deal the samples of each global batch so that all ranks have as much to do; None: as they come.
        read_ahead: MiB of records of tar shards that are read before they are needed (by each worker); 0: none.
        requests: to an object store at a time (of each worker).
        cache_dir: directory on a local disk that keeps records of shards on an object store; None: none are kept.
        cache_gib: GiB that it may take.

    Raises:
        UsageError: the global batch does not divide over the ranks, there is no such rank, or a number is too small.
    """

    def __init__(
        self,
        stream: Stream,
        schedule: BatchSchedule,
        *,
        micro_batch_size: int,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        start: int | None = None,
        stop: int | None = None,
        num_workers: int = 0,
        prefetch: int = 2,
        start_method: StartMethod | None = None,
        pin_memory: bool = False,
        fields: Collection[Field] = FIELDS,
        attention_mask: bool = False,
        pad_id: int = 0,
        balance: Balance | None = None,
        read_ahead: int = MEMORY,
        requests: int = REQUESTS,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_gib: float = 100.0,
    ) -> None:
        self.stream = stream
        self.schedule = schedule
        self.micro_batch_size = micro_batch_size
        self._ranks = data_parallel(dp_rank, dp_size)
        self.dp_rank, self.dp_size = self._ranks.rank, self._ranks.size
        self.start = stream.start if start is None else start
        self.stop = stop
        self.num_workers = num_workers
        self.prefetch = prefetch
        self.start_method = start_method
        self.pin_memory = pin_memory
        self.balance = balance
        if read_ahead < 0 or requests < 1:
            raise UsageError(
                "nothing can be read ahead like this",
                found=f"read_ahead={read_ahead}, requests={requests}",
                expected="read_ahead of 0 MiB or more, and 1 request or more",
            )
        self.read_ahead, self.requests = read_ahead, requests
        if cache_dir is not None:
            use_cache(stream.sources, cache_dir, gib=cache_gib)
        #: what becomes of the last step if the stream ends within it, which is then said: see `indices`.
        self.at_end: AtEnd = "refuse"
        self.dataset = StreamDataset(stream, fields=fields, attention_mask=attention_mask, pad_id=pad_id)
        # Wrong sizes must fail when the loader is built, on every rank, not in the middle of the ramp-up.
        for _, size in schedule.segments:
            micro_batches(0, size, micro_batch_size=micro_batch_size, dp_rank=self.dp_rank, dp_size=self.dp_size)

    def indices(self) -> Iterator[Sequence[int]]:
        """The sample numbers of every micro-batch of this rank, in order.

        Raises:
            StreamExhausted: the stream ends within a global batch, and ``at_end`` is ``refuse``. At its start, on every
                rank: one that was handed batches while another one ran dry would wait for it for ever.
        """
        for _, micro_steps in self.steps():
            yield from micro_steps

    def steps(self) -> Iterator[tuple[range, Sequence[Sequence[int]]]]:
        """The samples of every step, and of its micro-batches on this rank."""
        sample = self.start
        while self.stop is None or sample < self.stop:
            size = self.schedule.size_at(sample)
            try:
                self.stream.check_reaches(sample + size)
            except StreamExhausted:
                if self.at_end == "refuse":
                    raise
                yield from self._last_step(sample, size)
                return
            micro_steps = deal(
                self.stream,
                sample,
                size,
                micro_batch_size=self.micro_batch_size,
                dp_rank=self.dp_rank,
                dp_size=self.dp_size,
                balance=self.balance,
            )
            yield range(sample, sample + size), micro_steps
            sample += size

    def _last_step(self, sample: int, size: int) -> Iterator[tuple[range, Sequence[Sequence[int]]]]:
        layout = {"micro_batch_size": self.micro_batch_size, "dp_size": self.dp_size}
        there = available(self.stream, sample, size)
        samples = sum(in_parts(there, **layout)) if self.at_end == "deal" else 0
        if samples:
            micro_steps = deal_in_part(
                self.stream, sample, samples, dp_rank=self.dp_rank, balance=self.balance, **layout
            )
            yield range(sample, sample + samples), micro_steps
        if samples < there:
            why = f"there are {self.dp_size} ranks" if self.at_end == "deal" else f"a step has {size}"
            log.warning("megaresume: the last %d samples of the stream are not trained: %s", there - samples, why)

    def __iter__(self) -> Iterator[Batch]:
        """Micro-batches from ``start`` on; every call begins there again.

        Raises:
            StreamExhausted: the stream ends within the next global batch; on every rank alike.
            CorpusError: a document is damaged.
            StateError: there are other ranks than when the loader was made.
            UsageError: spawned workers would begin the script again, which has no ``if __name__ == "__main__":``.
        """
        self._ranks.check()
        if self.num_workers:
            return self._from_workers()
        if self.prefetch:
            return self._from_thread()
        return self._on_demand()

    def _on_demand(self) -> Iterator[Batch]:
        if self.dataset.reads_several and not self.pin_memory:
            yield from Together(self.dataset, self.steps())
            return
        ahead = self.read_ahead_of()
        try:
            for samples in self.indices():
                with ahead.reading(samples):
                    batch = self.dataset.read(samples, pin_memory=self.pin_memory)
                yield batch
        finally:
            ahead.close()

    def read_ahead_of(self, worker: int = 0, workers: int = 1) -> ReadAhead:
        """What reads ahead in the process that reads every ``workers``-th micro-batch from number ``worker`` on."""
        whole_steps = copy.copy(self)
        whole_steps.at_end = "refuse"  # what is special about the last step is said once, where it is read
        upcoming = islice(whole_steps.indices(), worker, None, workers)
        return ReadAhead(self.dataset.stream, upcoming, memory=self.read_ahead << 20, requests=self.requests)

    def _from_workers(self) -> Iterator[Batch]:
        check_main_guard(self.start_method)
        indices, ahead = _Indices(self), max(self.prefetch, 1)
        inbox = Inbox(pin_memory=self.pin_memory)
        loader = torch.utils.data.DataLoader(
            _InWorkers(self),
            batch_sampler=indices,
            num_workers=self.num_workers,
            collate_fn=Outbox(whole, ahead=ahead),
            worker_init_fn=outlive_signals,
            prefetch_factor=ahead,
            multiprocessing_context=self.start_method,
            # It draws the workers' seeds. From the global generator, they would change the dropout of the model.
            generator=torch.Generator(),
        )
        for parcel in loader:
            yield shown(inbox.unpack(parcel), pin_memory=inbox.pin_memory)
        if indices.ended is not None:
            raise indices.ended

    def _from_thread(self) -> Iterator[Batch]:
        ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=self.prefetch)
        stopped = threading.Event()

        def put(item: Batch | BaseException | None) -> bool:
            while not stopped.is_set():
                try:
                    ready.put(item, timeout=0.1)
                except queue.Full:
                    continue
                return True
            return False

        def read_ahead() -> None:
            try:
                for batch in self._on_demand():
                    if not put(batch):
                        return
                put(None)
            except BaseException as error:  # noqa: BLE001  raised again in the consumer's thread
                put(error)

        thread = threading.Thread(target=read_ahead, name="megaresume-prefetch", daemon=True)

        def stop(timeout: float | None = None) -> None:
            stopped.set()
            thread.join(timeout)

        thread.start()
        # A thread that is inside torch as Python ends aborts the process, with status -6.
        atexit.register(stop, _PATIENCE_AT_EXIT)
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            atexit.unregister(stop)
            stop()


class _InWorkers(torch.utils.data.Dataset[Batch]):
    """What worker processes read, each what is dealt to it: of images, levels instead of pixels."""

    def __init__(self, loader: StreamLoader) -> None:
        self._loader = loader
        self._ahead: ReadAhead | None = None

    def __getitems__(self, samples: Sequence[int]) -> Batch:
        loader = self._loader
        if self._ahead is None:
            info = torch.utils.data.get_worker_info()
            assert info is not None
            loader.stream = loader.dataset.stream  # of this process
            self._ahead = loader.read_ahead_of(info.id, info.num_workers)
        with self._ahead.reading(samples):
            return loader.dataset.read(samples, levels=True)


class _Indices:
    """A batch sampler: lists of sample numbers.

    It is asked far ahead of the batches: what ends it must not be raised before those that are on their way are out.
    """

    def __init__(self, loader: StreamLoader) -> None:
        self._loader = loader
        self.ended: MegaresumeError | None = None

    def __iter__(self) -> Iterator[list[int]]:
        try:
            for samples in self._loader.indices():
                yield list(samples)
        except MegaresumeError as error:
            self.ended = error
