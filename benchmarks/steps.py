"""Steps of a real model on two processes: with balanced ranks, in the order of the stream, and as predicted.

Attention sees one document at a time (`scaled_dot_product_attention` from bound to bound of ``cu_seqlens``), gradients
are added up over gloo, and a step ends when both ranks have them. What a token costs is measured first, as
docs/batches.md says. Every global batch is trained both ways, one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from benchmarks.balance import MIXES, Mix
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import median, wall
from megaresume.batches.loader import StreamDataset
from megaresume.batches.open import open_stream
from megaresume.stream.batches import Balance
from megaresume.stream.dealing import costs, deal
from megaresume.stream.stream import Stream

RANKS, BATCH, SEQ_LENGTH = 2, 8, 4096
HIDDEN, LAYERS, VOCABULARY = 64, 2, 512
#: documents of the mixes are made for samples of 32,768 tokens.
SHORTER = 8


class Measured(NamedTuple):
    """Of a mix: seconds of each step, and what its slowest rank was predicted to cost; by whether it was balanced."""

    seconds: dict[bool, list[float]]
    work: dict[bool, list[int]]


def rows(setup: Setup) -> Iterator[Row]:
    """The mixes with long documents."""
    steps = setup.sizes.repetitions
    for mix in MIXES[1:]:
        folder = setup.directory / f"steps-{mix.name.split()[0]}"
        folder.mkdir()
        spawn(_train, (mix.name, steps, folder, sorted(setup.cores)), nprocs=RANKS)
        measured: Measured = torch.load(folder / "measured", weights_only=False)
        times = [plain / ours for plain, ours in zip(measured.seconds[False], measured.seconds[True], strict=True)]
        predicted = [plain / ours for plain, ours in zip(measured.work[False], measured.work[True], strict=True)]
        yield Row(
            what=f"a step of {BATCH} samples of {SEQ_LENGTH:,} tokens on {RANKS} balanced ranks, {mix.name}",
            ours=1000 * median(measured.seconds[True]),
            unit="ms",
            baseline=1000 * median(measured.seconds[False]),
            against=f"in the order of the stream; predicted {median(predicted):.3f} x",
            ratio=median(times),
        )


def _train(rank: int, name: str, steps: int, folder: Path, cores: list[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = Model()
    stream = _stream(next(mix for mix in MIXES if mix.name == name), BATCH * (steps + 1))
    balance = Balance(token_cost=_token_cost(model))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    work: dict[bool, list[int]] = {True: [], False: []}
    for step in range(steps + 1):
        for balanced in (step % 2 == 0, step % 2 != 0):
            begin = _barrier()
            _step(model, stream, step * BATCH, rank, balance if balanced else None)
            if step:  # the first one compiles
                seconds[balanced].append(_barrier() - begin)
                work[balanced].append(_work(stream, step * BATCH, balance, dealt=balanced))
    if rank == 0:
        torch.save(Measured(seconds, work), folder / "measured")
    dist.destroy_process_group()


def _stream(mix: Mix, samples: int) -> Stream:
    lengths = np.maximum(mix.lengths(2 * samples * SEQ_LENGTH * SHORTER // mix.mean) // SHORTER, 1)
    data = {"seed": 1, "seq_length": SEQ_LENGTH, "packing": "best_fit", "sources": {"data": {}}}
    return open_stream(data, objects={"data": Texts(lengths.tolist())})


class Texts:
    """Documents of these lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def length(self, i: int) -> int:
        """Tokens."""
        return self._lengths[i]

    def get(self, i: int) -> np.ndarray:
        """The tokens."""
        return np.arange(i, i + self._lengths[i]) % VOCABULARY


class Model(nn.Module):
    """A small transformer whose attention does not look across documents."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        """The loss: tokens and labels are int64[S], bounds where documents begin, and S."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, bounds)
        return nn.functional.cross_entropy(hidden @ self.embedding.weight.T, labels)


class Layer(nn.Module):
    """Attention within documents, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, hidden: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        """float[S, HIDDEN] to the same."""
        parts = []
        for document in self.qkv(hidden).split(np.diff(bounds).tolist()):
            query, key, value = document[None, None].chunk(3, dim=-1)
            parts.append(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)[0, 0])
        hidden = hidden + self.out(torch.cat(parts))
        return hidden + self.mlp(hidden)


def _step(model: Model, stream: Stream, sample: int, rank: int, balance: Balance | None) -> None:
    dataset = StreamDataset(stream, fields=["labels"])
    for numbers in deal(stream, sample, BATCH, micro_batch_size=1, dp_rank=rank, dp_size=RANKS, balance=balance):
        batch = dataset.read(numbers)
        model(batch["tokens"][0], batch["labels"][0], batch["cu_seqlens"][0].tolist()).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad = None


def _work(stream: Stream, sample: int, balance: Balance, *, dealt: bool) -> int:
    """What the slowest rank is predicted to cost."""
    cost = costs(stream.plan(sample, sample + BATCH), balance)
    ranks = (
        deal(stream, sample, BATCH, micro_batch_size=1, dp_rank=rank, dp_size=RANKS, balance=balance if dealt else None)
        for rank in range(RANKS)
    )
    return max(sum(int(cost[number - sample]) for numbers in micros for number in numbers) for micros in ranks)


def _token_cost(model: Model) -> int:
    """As docs/batches.md measures it, with documents of a whole sample and of an eighth; the same on all ranks."""
    tokens = torch.zeros(SEQ_LENGTH, dtype=torch.int64)
    a, b = SEQ_LENGTH, SEQ_LENGTH // 8
    seconds: dict[int, list[float]] = {a: [], b: []}
    for _ in range(7):
        for length in seconds:
            begin = wall()
            model(tokens, tokens, list(range(0, SEQ_LENGTH + 1, length))).backward()
            seconds[length].append(wall() - begin)
    r = median(seconds[a]) / median(seconds[b])
    measured = torch.tensor([(r * b - a) / (1 - r)])
    dist.broadcast(measured, 0)
    for parameter in model.parameters():
        parameter.grad = None
    return max(int(measured), 0)


def _barrier() -> float:
    dist.barrier()
    return wall()
