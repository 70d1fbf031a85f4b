"""`StreamLoader`: packed samples of a stream, as the micro-batches of one rank (`rank_loader`).

`StreamDataset`: the stream as a map-style torch dataset; item i is a pure function of the stream and i. In a worker
process it plans for itself: workers get sample numbers, never samples, so that neither their number nor how they were
started can affect the order.

`Together`: reads several small micro-batches of text at once. Python's overhead for a batch takes as long as copying
10,000 tokens, so it is paid once for as many of this rank's next micro-batches as fit into `TOKENS`: one plan, one
layout, one copy from each source. A block begins and ends with a step, unless a step is longer.

    samples of this rank   0 | 2 | 4 | 6 | 8 | 10 | 12 | ...
    read at once           1 |   2   |       4         | ...     doubled as long as that is quick

Only the timing changes: the end of the stream, and an error, come at the micro-batch that they belong to.
"""

from __future__ import annotations

import copy
import inspect
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Literal, cast

import torch.utils.data
from numba.core.compiler_lock import global_compiler_lock

from megaresume.batches.ahead import MEMORY, REQUESTS, ReadAhead, use_cache
from megaresume.batches.assemble import Assembler, make_batch, make_batches
from megaresume.batches.batch import FIELDS, PAIRS, Batch, Field, check_fields
from megaresume.batches.cold_pages import ColdPages
from megaresume.batches.images import shown
from megaresume.batches.rank_loader import RankLoader, data_parallel
from megaresume.batches.workers import Workers
from megaresume.data.source import Source
from megaresume.stream.batches import Balance, BatchSchedule
from megaresume.stream.errors import ConfigError, UsageError
from megaresume.stream.planner import Plan, concatenate
from megaresume.stream.source import AbsentSource
from megaresume.stream.stream import Stream

StartMethod = Literal["fork", "spawn", "forkserver"]


class StreamLoader(RankLoader):
    """Iterates over the micro-batches of one data-parallel rank, in order, forever.

    Without workers, a prefetch thread reads, in compiled loops that release the GIL; nothing is faster for corpora of
    tokens. Worker processes (fork or spawn, any number) are for sources whose ``get`` is slow Python. With
    ``prefetch=0``, the consumer's thread reads on demand. Small micro-batches of text are read several at once, except
    in workers and into page-locked memory: see `Together`.

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
        fields: which of ``labels``, ``loss_mask`` and ``position_ids`` batches include; leave out those that the loop
            makes itself, to save their time.
        attention_mask: add the document-diagonal mask.
        pad_id: token written where there is no document.
        balance: deal the samples of each global batch so that all ranks have equal work; None: in stream order.
        read_ahead: MiB of records of tar shards that are read before they are needed (by each worker); 0: none.
        requests: to an object store at a time (of each worker).
        cache_dir: directory on a local disk that caches records of shards on an object store; None: no cache.
        cache_gib: its limit in GiB.

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
        super().__init__(
            stream,
            schedule,
            micro_batch_size=micro_batch_size,
            ranks=data_parallel(dp_rank, dp_size),
            balance=balance,
            num_workers=num_workers,
            at_end="refuse",
        )
        self._start, self._was_read = stream.start if start is None else start, False
        self.stop, self.prefetch, self.start_method, self.pin_memory = stop, prefetch, start_method, pin_memory
        if read_ahead < 0 or requests < 1:
            raise UsageError(
                "bad settings for reading ahead",
                found=f"read_ahead={read_ahead}, requests={requests}",
                expected="read_ahead of 0 MiB or more, and 1 request or more",
                action=f"leave them out for the defaults: read_ahead={MEMORY}, requests={REQUESTS}",
            )
        self.read_ahead, self.requests = read_ahead, requests
        if cache_dir is not None:
            use_cache(stream.sources, cache_dir, gib=cache_gib)
        self.dataset = StreamDataset(stream, fields=fields, attention_mask=attention_mask, pad_id=pad_id)

    @property
    def start(self) -> int:
        """The first sample of a ``for``; setting it makes the next one begin there."""
        return self._start

    @start.setter
    def start(self, sample: int) -> None:
        self._start, self._was_read = sample, False

    def indices(self) -> Iterator[Sequence[int]]:
        """The sample numbers of every micro-batch of this rank, in order. Raises as `runs_of_steps`."""
        first = self.start
        while (run := self.next_steps(first, 1 if self.is_live else DEALT)) is not None:
            samples, step = run
            for _, mine in self.deal(samples, step):
                yield mine
            first = samples.stop

    def next_steps(self, first: int, micro_batches: int) -> tuple[range, int] | None:
        """The next steps from a sample on, as many as this many micro-batches make, but at least one."""
        samples = micro_batches * self.micro_batch_size * self.dp_size
        # Not so far that taking a state would need planning again.
        most = min(samples, self.dataset.stream.block_samples)
        try:
            return next(self.runs_of_steps(first, most=most), None)
        except Exception:  # noqa: BLE001  raised again by the step that it belongs to
            return next(self.runs_of_steps(first), None)

    def __iter__(self) -> Iterator[Batch]:
        """Micro-batches from ``start`` on; with ``stop``, every call begins there again.

        Raises:
            UsageError: a second call without ``stop``, as in a loop over epochs: it would begin again with ``start``.
                Or spawned workers would run the script again, which has no ``if __name__ == "__main__":``.
            StreamExhausted: the stream ends within the next global batch; on every rank alike.
            CorpusError: a document is damaged.
            StateError: the ranks have changed since the loader was made.
        """
        self.ranks.check()
        if self._was_read and self.stop is None:
            raise UsageError(
                "the loader would begin again with its first sample",
                found=f"a second for over a StreamLoader that begins at sample {self.start}",
                expected="one for: a stream has no epochs, and the loader does not count what was trained",
                cause="a for in each epoch, or a look at a batch before the training",
                action="loader.start = the number of samples that were trained, before the second for; or let "
                "megaresume.attach count",
            )
        self._was_read = True
        return self._read()

    def _in_process(self) -> Iterator[Batch]:
        if self.dataset.reads_several and not self.pin_memory:
            yield from Together(self)
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
        """The `ReadAhead` of the process that reads every ``workers``-th micro-batch from number ``worker`` on."""
        whole_steps = copy.copy(self)
        whole_steps.at_end = "refuse"  # a short last step is only reported where it is read
        upcoming = islice(whole_steps.indices(), worker, None, workers)
        return ReadAhead(self.dataset.stream, upcoming, memory=self.read_ahead << 20, requests=self.requests)

    def _from_workers(self) -> Iterator[Batch]:
        workers = Workers(
            _InWorkers(self),
            self.indices,
            num_workers=self.num_workers,
            prefetch_factor=max(self.prefetch, 1),
            copies_to_pinned=self.pin_memory,
            multiprocessing_context=self.start_method,
        )
        return (shown(batch, pin_memory=workers.inbox.pin_memory) for batch in workers)


class _InWorkers(torch.utils.data.Dataset[Batch]):
    """The dataset in worker processes, each of which reads its share; images as levels instead of pixels."""

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


#: micro-batches that are dealt at a time.
DEALT = 64
#: The most tokens read at once; exceeded only if one micro-batch has more.
TOKENS = 1 << 17
#: seconds: slower reads wait for a disk. Then one at a time is as fast, without waiting for the rest.
QUICK = 0.01

# A worker forked while another thread compiles (another loader's prefetch thread, at its first batch) would wait for
# numba's lock forever, so a fork waits until the lock is free.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)


class StreamDataset(torch.utils.data.Dataset[Batch]):
    """A dataset whose items are the samples of a stream, by number.

    With a ``DataLoader``, pass ``collate_fn=whole`` and a batch sampler of sample numbers.

    Args:
        stream: its sources must be readable, not only have lengths.
        num_samples: the result of ``len``, for samplers that need it (Megatron's): samples of the whole run.
        fields: the optional fields to include; each costs time.
        attention_mask: add the document-diagonal mask, bool[m, 1, S, S].
        pad_id: token written where there is no document.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        num_samples: int | None = None,
        fields: Collection[Field] = FIELDS,
        attention_mask: bool = False,
        pad_id: int = 0,
    ) -> None:
        check_fields(fields)
        self._num_samples = num_samples
        self._fields = tuple(fields)
        self.attention_mask = attention_mask
        self._pad_id = pad_id
        self._stream, self._owner = stream, os.getpid()
        self._assemblers: dict[tuple[int, int], Assembler] = {}
        self._ahead: ReadAhead | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state for workers that are spawned."""
        return self.__dict__ | {"_assemblers": {}, "_ahead": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_owner": os.getpid()})

    @property
    def stream(self) -> Stream:
        """This process's stream; in a worker, a copy from when the worker was started."""
        if self._owner != os.getpid():
            # After a fork: the parent's lock may have been held at that moment.
            self._stream, self._owner = copy.copy(self._stream), os.getpid()
            self._assemblers, self._ahead = {}, None
        return self._stream

    @property
    def assembler(self) -> Assembler:
        """Reads the tokens of planned samples of the stage that the stream continues in."""
        return self.assembler_of(self.stream.start, self.stream.start + 1)

    def assembler_of(self, first: int, stop: int) -> Assembler:
        """Reads the tokens of these planned samples.

        Raises:
            ConfigError: a stage with another sequence length or alignment begins among them.
        """
        same = self.stream.config_at(first) is self.stream.config_at(stop - 1)
        shape, *others = dict.fromkeys(map(self.stream.shape_at, (first,) if same else range(first, stop)))
        if others:
            (length, align), (other, other_align) = sorted((shape, others[0]))
            raise ConfigError(
                "a stage with samples of another shape begins inside a micro-batch",
                found=f"samples {first} to {stop - 1} of {length} and {other} tokens, aligned to {align} and "
                f"{other_align}",
                expected="samples of one shape in a micro-batch",
                action="declare the stage with from_step, or with from_samples at the beginning of a step",
            )
        if shape not in self._assemblers:
            sources = cast(list[Source], self.stream.sources)
            config = self.stream.config
            self._assemblers[shape] = Assembler(
                sources,
                seq_length=shape[0],
                align=shape[1],
                pad_id=self._pad_id,
                seed=config.seed,
                names=[source.name for source in config.sources],
                cold=ColdPages(self.stream, shape[0]),
            )
        return self._assemblers[shape]

    def __len__(self) -> int:
        """The number of samples of the run.

        Raises:
            TypeError: no number was given; the stream itself has no end.
        """
        if self._num_samples is None:
            raise TypeError("the stream has no end: pass num_samples to StreamDataset")
        return self._num_samples

    def __getitem__(self, sample: int) -> Batch:
        """One sample, as a batch of one."""
        return self.__getitems__([sample])

    def __getitems__(self, samples: Sequence[int]) -> Batch:
        """A micro-batch: ``samples`` in this order, usually consecutive. Also reads the records of the next ones
        ahead."""
        stream = self.stream  # of this process
        if self._ahead is None:
            self._ahead = ReadAhead(stream, None)
        with self._ahead.reading(samples):
            return self.read(samples)

    def read(self, samples: Sequence[int], *, pin_memory: bool = False, levels: bool = False) -> Batch:
        """Read samples as one batch; optionally in page-locked memory, or with image levels instead of pixels."""
        plan = self.plan_of(samples)
        assembler = self.assembler_of(min(samples), max(samples) + 1)
        return make_batch(
            plan,
            assembler,
            samples=samples,
            fields=self._fields,
            attention_mask=self.attention_mask,
            pin_memory=pin_memory,
            levels=levels,
        )

    @property
    def reads_several(self) -> bool:
        """Whether `read_several` may be used: all tokens are in arrays, and only fields of them are included."""
        return (
            not self.attention_mask
            and PAIRS not in self._fields
            # Checked without opening a file of tokens, which may never be needed.
            and all(
                isinstance(source, AbsentSource) or inspect.getattr_static(source, "token_view", None) is not None
                for source in self.stream.sources
            )
        )

    def read_several(self, micro_batches: Sequence[Sequence[int]]) -> list[Batch]:
        """Micro-batches like `read` returns them, each with its own tensors, in shared memory."""
        samples = list(chain.from_iterable(micro_batches))
        return make_batches(
            self.plan_of(samples),
            self.assembler_of(min(samples), max(samples) + 1),
            samples,
            sizes=list(map(len, micro_batches)),
            fields=self._fields,
        )

    def plan_of(self, samples: Sequence[int]) -> Plan:
        """What these samples hold, in this order."""
        plans: list[Plan] = []
        first, stop = samples[0], samples[-1] + 1
        if samples == list(range(first, stop)):
            return self.stream.plan(first, stop)
        stop = first
        for sample in samples:
            if sample != stop:
                plans.append(self.stream.plan(first, stop))
                first = sample
            stop = sample + 1
        return concatenate([*plans, self.stream.plan(first, stop)])


class Together:
    """Iterates once over the micro-batches of a loader."""

    def __init__(self, loader: StreamLoader) -> None:
        self._loader = loader
        #: the most micro-batches read at once.
        self._most = 1

    def __iter__(self) -> Iterator[Batch]:
        """Raises the same errors as reading one by one, after the same micro-batches."""
        for block in self._blocks():
            begun = time.perf_counter()
            batches = self._read(block)
            quick = time.perf_counter() - begun < QUICK
            self._most = min(2 * self._most, TOKENS) if quick else max(len(block) // 2, 1)
            yield from batches
            del batches  # so that the next ones can reuse their memory, still in the cache

    def _read(self, block: Sequence[Sequence[int]]) -> Iterable[Batch]:
        dataset = self._loader.dataset
        try:
            return dataset.read_several(block)
        except Exception:  # noqa: BLE001  raised again by the one that it belongs to
            return map(dataset.read, block)

    def _blocks(self) -> Iterator[Sequence[Sequence[int]]]:
        loader, stream = self._loader, self._loader.dataset.stream
        first = loader.start
        while (run := loader.next_steps(first, self._most)) is not None:
            samples, step = run
            mine = [micro_batch for _, micro_batch in loader.deal(samples, step)]
            alike = stream.config_at(samples[0]) is stream.config_at(samples[-1])  # else the shape may change within
            room, begin = TOKENS // stream.shape_at(samples[0])[0] if alike else 1, 0
            while begin < len(mine):
                stop = begin + max(min(self._most, room // len(mine[begin])), 1)
                yield mine[begin:stop]
                begin = stop
            first = samples.stop
