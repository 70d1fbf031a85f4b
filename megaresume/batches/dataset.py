"""`StreamDataset`: the stream as a map-style torch dataset; item i is a pure function of the stream and i.

In a worker process it plans for itself: a worker is handed sample numbers, never samples, so that neither the number
of workers nor how they were started can enter the order.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Collection, Sequence
from typing import Any, cast

import torch.utils.data
from numba.core.compiler_lock import global_compiler_lock

from megaresume.batches.ahead import ReadAhead
from megaresume.batches.assemble import FIELDS, PAIRS, Assembler, Field, check_fields
from megaresume.batches.batch import Batch, make_batch, make_batches
from megaresume.batches.cold import ColdPages
from megaresume.corpora.base import Source
from megaresume.stream.errors import ConfigError
from megaresume.stream.planning.plan import Plan, concatenate
from megaresume.stream.source import AbsentSource
from megaresume.stream.stream import Stream

# A worker that is forked while another thread compiles (the prefetch thread of another loader, at its first batch)
# would wait for numba's lock for ever: a fork waits until it is free.
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
        """This process's stream, which goes on where that of the parent did when this process was started."""
        if self._owner != os.getpid():
            # Forked: the parent's lock may have been held at that moment.
            self._stream, self._owner = copy.copy(self._stream), os.getpid()
            self._assemblers, self._ahead = {}, None
        return self._stream

    @property
    def assembler(self) -> Assembler:
        """Reads the tokens of planned samples of the stage that the stream goes on in."""
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
