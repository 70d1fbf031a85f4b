"""Tokens alone, as a model takes them that makes its own mask and positions: small micro-batches, in process.

Beside ours, of packages that are installed: torchdata's nodes over a memory map, litData's and MosaicML's streaming
over their own files of the same size, and Megatron's `GPTDataset`, which makes all of its fields. Everybody shuffles,
and hands over int64[m, 2048]; ours the bounds of documents, the numbers and the identities of samples as well. The
nodes do so with tokens alone, and with bounds and numbers, which they find in the tokens and the index. Ours plans,
blends three sources and packs documents; of the others only `GPTDataset` knows documents, and it has built its index
before. Every page of our maps was touched before: the first touch costs 0.1 to 0.4 us, once in a process, and the maps
of the others are so small that they pay it while they warm up.
"""

from __future__ import annotations

import mmap
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler

from benchmarks import gpt
from benchmarks.corpora import END_OF_DOCUMENT, WEIGHTS
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import cpu, interleaved, median, ratio
from megaresume.batches.loader import StreamLoader
from megaresume.data.layout import bin_path
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.config import StreamConfig
from megaresume.stream.stream import Stream

SEQ_LENGTH = 2048
MICRO_BATCHES = (1, 4, 32)

#: How many times as fast as each of the others ours must be, if not 1: these hand over less, rows that were cut before.
LEAST = {"torchdata's nodes": 0.5}

#: Gives an endless iterator over batches of so many samples.
Open = Callable[[int], Iterator[torch.Tensor]]
Prepare = Callable[[Setup, "np.ndarray[Any, Any]"], Open]


def rows(setup: Setup) -> Iterator[Row]:
    """Processor time of a token, each against each that is there."""
    torch.set_num_threads(1)
    samples = setup.sizes.read_samples
    others = _others(setup, samples * (setup.sizes.slow_repetitions + 1))
    for micro_batch in MICRO_BATCHES:
        opened = {name: open_(micro_batch) for name, open_ in {"ours": _ours(setup), **others}.items()}
        compared = {name: _reader(batches, samples // micro_batch, micro_batch) for name, batches in opened.items()}
        seconds = interleaved(compared, setup.sizes.slow_repetitions, clock=cpu)
        a_token = {name: [1e9 * s / (samples * SEQ_LENGTH) for s in its] for name, its in seconds.items()}
        for name in others:
            times, least = ratio(a_token["ours"], a_token[name]), LEAST.get(name, 1)
            yield Row(
                what=f"tokens alone, micro-batches of {micro_batch} x {SEQ_LENGTH}",
                ours=median(a_token["ours"]),
                unit="ns a token",
                baseline=median(a_token[name]),
                against=name,
                ratio=times,
                must=f"> {least} x",
                holds=times > least,
            )


def _reader(batches: Iterator[torch.Tensor], num: int, micro_batch: int) -> Callable[[int], object]:
    def read(repetition: int) -> None:
        for tokens in islice(batches, num):
            assert tokens.shape == (micro_batch, SEQ_LENGTH) and tokens.dtype == torch.int64

    return read


def _ours(setup: Setup) -> Open:
    def batches(micro_batch: int) -> Iterator[torch.Tensor]:
        sources = {name: {"weight": weight} for name, weight in WEIGHTS.items()}
        data = {"seed": 1234, "seq_length": SEQ_LENGTH, "packing": "split", "sources": sources}
        corpora = setup.sources(setup.corpora)
        for corpus in corpora:
            corpus.token_view[:: mmap.PAGESIZE // corpus.dtype.itemsize].max()
        stream = Stream(StreamConfig.from_dict(data), corpora)
        schedule = BatchSchedule.constant(micro_batch)
        loader = StreamLoader(stream, schedule, micro_batch_size=micro_batch, prefetch=0, fields=())
        return (batch["tokens"] for batch in loader)

    return batches


def _others(setup: Setup, samples: int) -> dict[str, Open]:
    tokens = np.memmap(bin_path(setup.corpora["web"]), np.int32, "r")[: samples * SEQ_LENGTH].reshape(-1, SEQ_LENGTH)
    nodes = {"torchdata's nodes": _nodes, "torchdata's nodes, with bounds and numbers": _nodes_alike}
    of = {**nodes, **STREAMING, "GPTDataset, with all of its fields": _gpt}
    return installed(setup, tokens, of)


def installed(setup: Setup, tokens: np.ndarray[Any, Any], of: Mapping[str, Prepare]) -> dict[str, Open]:
    """Those that are installed, over these samples; of the others standard error says so."""
    there: dict[str, Open] = {}
    for name, prepare in of.items():
        try:
            there[name] = prepare(setup, tokens)
        except ImportError as error:
            print(f"benchmarks: {name} is left out: {error}", file=sys.stderr)
    return there


def _again_and_again(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def _nodes(setup: Setup, tokens: np.ndarray[Any, Any]) -> Open:
    from torchdata import nodes

    def batches(micro_batch: int) -> Iterator[torch.Tensor]:
        shuffled = nodes.SamplerWrapper(RandomSampler(range(len(tokens))))
        read = nodes.Mapper(shuffled, lambda i: torch.from_numpy(tokens[i].astype(np.int64)))
        batched = nodes.Mapper(nodes.Batcher(read, micro_batch), torch.stack)
        return _again_and_again(nodes.Loader(batched))

    return batches


def _nodes_alike(setup: Setup, tokens: np.ndarray[Any, Any]) -> Open:
    from torchdata import nodes

    def sample(i: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        row = tokens[i]
        starts = np.flatnonzero(row[:-1] == END_OF_DOCUMENT) + 1
        bounds = np.concatenate(([0], starts, [SEQ_LENGTH])).astype(np.int32)
        return torch.from_numpy(row.astype(np.int64)), torch.from_numpy(bounds), i

    def batch(samples: list[tuple[torch.Tensor, torch.Tensor, int]]) -> dict[str, Any]:
        rows, bounds, numbers = zip(*samples, strict=True)
        return {"tokens": torch.stack(rows), "cu_seqlens": list(bounds), "samples": torch.tensor(numbers)}

    def batches(micro_batch: int) -> Iterator[torch.Tensor]:
        shuffled = nodes.SamplerWrapper(RandomSampler(range(len(tokens))))
        batched = nodes.Mapper(nodes.Batcher(nodes.Mapper(shuffled, sample), micro_batch), batch)
        return (batch["tokens"] for batch in _again_and_again(nodes.Loader(batched)))

    return batches


def _litdata(setup: Setup, tokens: np.ndarray[Any, Any]) -> Open:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming.writer import BinaryWriter

    folder = tempfile.mkdtemp(dir=setup.directory)
    items = TokensLoader(block_size=SEQ_LENGTH)
    writer = BinaryWriter(folder, chunk_bytes="64MB", item_loader=items)
    for k, sample in enumerate(tokens):
        writer.add_item(k, torch.from_numpy(sample.copy()))
    writer.done()
    writer.merge()

    def batches(micro_batch: int) -> Iterator[torch.Tensor]:
        data = StreamingDataset(folder, item_loader=TokensLoader(block_size=SEQ_LENGTH), shuffle=True, drop_last=True)
        loader = StreamingDataLoader(data, batch_size=micro_batch, num_workers=0)
        return (batch.long() for batch in _again_and_again(loader))

    return batches


def _mosaicml(setup: Setup, tokens: np.ndarray[Any, Any]) -> Open:
    from streaming import MDSWriter, StreamingDataset

    folder = Path(tempfile.mkdtemp(dir=setup.directory)) / "mds"
    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:int32:{SEQ_LENGTH}"}) as writer:
        for sample in tokens:
            writer.write({"tokens": sample})

    def batches(micro_batch: int) -> Iterator[torch.Tensor]:
        data = StreamingDataset(local=str(folder), shuffle=True, batch_size=micro_batch)
        loader = DataLoader(data, batch_size=micro_batch, drop_last=True)
        return (batch["tokens"].long() for batch in _again_and_again(loader))

    return batches


def _gpt(setup: Setup, tokens: np.ndarray[Any, Any]) -> Open:
    blend = gpt.build(setup.corpora, len(tokens), seq_length=SEQ_LENGTH)

    def batches(micro_batch: int) -> Iterator[torch.Tensor]:
        sampler = gpt.Sampler(0, len(tokens) // micro_batch * micro_batch, micro_batch)
        return (batch["tokens"] for batch in _again_and_again(DataLoader(blend, batch_sampler=sampler)))

    return batches


#: Those that read files of their own.
STREAMING: dict[str, Prepare] = {"litData": _litdata, "MosaicML streaming": _mosaicml}
