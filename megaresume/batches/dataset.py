"""`StreamDataset`: the stream as a map-style torch dataset; item i is a pure function of the stream and i.

In a worker process it plans for itself: a worker is handed sample numbers, never samples, so that neither the number
of workers nor how they were started can enter the order.

`Together`: small micro-batches of text, several read at once. What Python does for a batch takes as long as copying
10,000 tokens. So it is done once for as many micro-batches as this rank takes next, up to `TOKENS`: one plan, one
layout, one copy from each source.

    samples of this rank   0 | 2 | 4 | 6 | 8 | 10 | 12 | ...
    read at once           1 |   2   |       4         | ...     twice as many, as long as that is quick

Nothing can be told from it but the time: the end of the stream, and an error, come at the micro-batch that they belong
to.
"""

from __future__ import annotations

import copy
import inspect
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, cast

import torch.utils.data
from numba.core.compiler_lock import global_compiler_lock

from megaresume.batches.ahead import ColdPages, ReadAhead
from megaresume.batches.assemble import Assembler, make_batch, make_batches
from megaresume.batches.batch import FIELDS, PAIRS, Batch, Field, check_fields
from megaresume.data.source import Source
from megaresume.stream.errors import ConfigError
from megaresume.stream.planner import Plan, concatenate
from megaresume.stream.source import AbsentSource
from megaresume.stream.stream import Stream

#: tokens read at once, at most; more only if one micro-batch has more.
TOKENS = 1 << 16
#: seconds: what takes longer waits for a disk. Then one at a time is as fast, and nobody waits for all of them.
QUICK = 0.01

# A worker that is forked while another thread compiles (the prefetch thread of another loader, at its first batch)
# would wait for numba's lock forever: a fork waits until it is free.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)


def whole(batch: Any) -> Any:
    """Collation for a `torch.utils.data.DataLoader` over a `StreamDataset`, which fetches whole micro-batches."""
    return batch


class StreamDataset(torch.utils.data.Dataset[Batch]):
    """Samples of a stream by number.

    With a ``DataLoader``, pass ``collate_fn=whole`` and a batch sampler that gives sample numbers.

    Args:
        stream: the stream; its sources must be readable, not only give lengths.
        num_samples: what ``len`` answers, for samplers that ask (Megatron's do): samples of the whole run.
        fields: which of those that a loop can do without, besides the tokens: each costs time.
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
        """For workers that are spawned."""
        return self.__dict__ | {"_assemblers": {}, "_ahead": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_owner": os.getpid()})

    @property
    def stream(self) -> Stream:
        """This process's stream, which continues where that of the parent did when this process was started."""
        if self._owner != os.getpid():
            # Forked: the parent's lock may have been held at that moment.
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
        """Samples of the run.

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
        """A micro-batch: ``samples`` in this order, usually consecutive. Records of the next ones are read ahead."""
        stream = self.stream  # of this process
        if self._ahead is None:
            self._ahead = ReadAhead(stream, None)
        with self._ahead.reading(samples):
            return self.read(samples)

    def read(self, samples: Sequence[int], *, pin_memory: bool = False, levels: bool = False) -> Batch:
        """The same, if asked for in page-locked memory, or with levels of images instead of pixels."""
        plan = self._plan(samples)
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
        """Whether `read_several` may be used: all tokens lie in arrays, and nothing is asked for but fields of them."""
        return (
            not self.attention_mask
            and PAIRS not in self._fields
            # Looked up without opening a file of tokens, which may never be needed.
            and all(
                isinstance(source, AbsentSource) or inspect.getattr_static(source, "token_view", None) is not None
                for source in self.stream.sources
            )
        )

    def read_several(self, micro_batches: Sequence[Sequence[int]]) -> list[Batch]:
        """Micro-batches as `read` gives them, each with tensors of its own, in memory that they share."""
        samples = [sample for one in micro_batches for sample in one]
        return make_batches(
            self._plan(samples),
            self.assembler_of(min(samples), max(samples) + 1),
            samples,
            sizes=[len(one) for one in micro_batches],
            fields=self._fields,
        )

    def _plan(self, samples: Sequence[int]) -> Plan:
        plans = []
        first = stop = samples[0]
        for sample in samples:
            if sample != stop:
                plans.append(self.stream.plan(first, stop))
                first = sample
            stop = sample + 1
        return concatenate([*plans, self.stream.plan(first, stop)])


class Together:
    """Iterates once over micro-batches.

    Args:
        dataset: reads them.
        steps: see `StreamLoader.steps`.
    """

    def __init__(self, dataset: StreamDataset, steps: Iterable[tuple[range, Sequence[Sequence[int]]]]) -> None:
        self._dataset, self._steps = dataset, steps
        #: micro-batches.
        self._most = 1

    def __iter__(self) -> Iterator[Batch]:
        """Raises what reading them one by one raises, after the same micro-batches."""
        for block in self._blocks():
            begun = time.perf_counter()
            batches = self._read(block)
            quick = time.perf_counter() - begun < QUICK
            self._most = 2 * len(block) if quick else max(len(block) // 2, 1)
            yield from batches

    def _read(self, block: Sequence[Sequence[int]]) -> Iterable[Batch]:
        try:
            return self._dataset.read_several(block)
        except Exception:  # noqa: BLE001  raised again by the one that it belongs to
            return map(self._dataset.read, block)

    def _blocks(self) -> Iterator[list[Sequence[int]]]:
        stream = self._dataset.stream
        farthest = stream.block_samples
        block: list[Sequence[int]] = []
        shape, room, first = (0, 0), 0, 0
        try:
            for step, micro_steps in self._steps:
                for samples in micro_steps:
                    now = stream.shape_at(samples[0])
                    if block and (len(block) >= self._most or len(samples) > room or now != shape):
                        yield block
                        block = []
                    if not block:
                        shape, room, first = now, TOKENS // now[0], min(samples)
                    block.append(samples)
                    room -= len(samples)
                # Not so far that what a state needs would have to be planned again.
                if block and step.stop + len(step) - first > farthest:
                    yield block
                    block = []
        except Exception:
            if block:  # the error belongs to what comes after it
                yield block
            raise
        if block:
            yield block
