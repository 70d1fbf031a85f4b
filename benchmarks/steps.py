"""Steps of a real model on two processes: with balanced ranks, in the order of the stream, and as predicted.

Attention sees one document at a time (`scaled_dot_product_attention` from bound to bound of ``cu_seqlens``), gradients
are added up over gloo, and a step ends when both ranks have them. What a token costs is measured first, as
docs/batches.md says. Every global batch is trained both ways, one after the other.

With a GPU, its one device does the work of eight ranks in turn, and a step takes as long as the slowest of them:
bfloat16, samples of 32,768 tokens, attention by FlashAttention's kernels for documents of many lengths.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

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

LAYERS, VOCABULARY = 2, 512


class Shape(NamedTuple):
    """Of a training."""

    ranks: int
    batch: int
    seq_length: int
    hidden: int
    heads: int


ON_CORES = Shape(ranks=2, batch=8, seq_length=4096, hidden=64, heads=1)
ON_A_GPU = Shape(ranks=8, batch=64, seq_length=32_768, hidden=2048, heads=16)
RANKS, BATCH, SEQ_LENGTH = ON_CORES[:3]


class Measured(NamedTuple):
    """Of a mix: seconds of each step, and what its slowest rank was predicted to cost; by whether it was balanced."""

    seconds: dict[bool, list[float]]
    work: dict[bool, list[float]]


def rows(setup: Setup) -> Iterator[Row]:
    """The mixes with long documents; on a GPU, all of them."""
    steps = setup.sizes.repetitions
    if torch.cuda.is_available():
        yield from _rows_on_a_gpu(min(steps, 6))
        return
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
    model = Model(ON_CORES.hidden, ON_CORES.heads)
    stream = _stream(next(mix for mix in MIXES if mix.name == name), BATCH * (steps + 1), ON_CORES)
    token_cost = torch.tensor([_token_cost(model, SEQ_LENGTH)])
    dist.broadcast(token_cost, 0)
    balance = Balance(token_cost=int(token_cost))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    work: dict[bool, list[float]] = {True: [], False: []}
    for step in range(steps + 1):
        for balanced in (step % 2 == 0, step % 2 != 0):
            begin = _barrier()
            _step(model, stream, step * BATCH, rank, balance if balanced else None)
            if step:  # the first one compiles
                seconds[balanced].append(_barrier() - begin)
                work[balanced].append(_work(stream, step * BATCH, balance, dealt=balanced, shape=ON_CORES))
    if rank == 0:
        torch.save(Measured(seconds, work), folder / "measured")
    dist.destroy_process_group()


def _stream(mix: Mix, samples: int, shape: Shape) -> Stream:
    shorter = 32_768 // shape.seq_length  # documents of the mixes are made for samples of 32,768 tokens
    lengths = np.maximum(mix.lengths(2 * samples * shape.seq_length * shorter // mix.mean) // shorter, 1)
    data = {"seed": 1, "seq_length": shape.seq_length, "packing": "best_fit", "sources": {"data": {}}}
    return open_stream(data, objects={"data": Texts(lengths.tolist())})


def _rows_on_a_gpu(steps: int) -> Iterator[Row]:
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = Model(ON_A_GPU.hidden, ON_A_GPU.heads).to(device, torch.bfloat16)
    token_cost = _token_cost(model, ON_A_GPU.seq_length)
    balance = Balance(token_cost=token_cost)
    for mix in MIXES:
        stream = _stream(mix, ON_A_GPU.batch * (steps + 1), ON_A_GPU)
        times: dict[bool, list[float]] = {True: [], False: []}
        work: dict[bool, list[float]] = {True: [], False: []}
        for step in range(steps + 1):
            for balanced in (step % 2 == 0, step % 2 != 0):
                first = step * ON_A_GPU.batch
                spent = _seconds_of_ranks(model, stream, first, balance if balanced else None)
                if step:
                    times[balanced].append(max(spent) / (sum(spent) / len(spent)))
                    work[balanced].append(_work(stream, first, balance, dealt=balanced, shape=ON_A_GPU, relative=True))
        yield Row(
            what=f"{ON_A_GPU.ranks} ranks' steps of {ON_A_GPU.batch} samples of {ON_A_GPU.seq_length:,} tokens, "
            f"{mix.name}: the slowest rank above the mean",
            ours=100 * (median(times[True]) - 1),
            unit="%",
            baseline=100 * (median(times[False]) - 1),
            against=f"in the order of the stream; predicted {100 * (median(work[True]) - 1):.2f} and "
            f"{100 * (median(work[False]) - 1):.2f} %, token cost {token_cost:,}",
        )


def _seconds_of_ranks(model: Model, stream: Stream, sample: int, balance: Balance | None) -> list[float]:
    """Of a step: of each rank, forward and backward of all its samples, one after the other."""
    shape, dataset = ON_A_GPU, StreamDataset(stream, fields=["labels"])
    seconds: list[float] = []
    for rank in range(shape.ranks):
        batches = []
        plan = stream.plan(sample, sample + shape.batch)
        for numbers in deal(plan, balance, micro_batch_size=1, dp_rank=rank, dp_size=shape.ranks):
            read = dataset.read(numbers.tolist())
            tokens, labels = (read[name][0].to("cuda") for name in ("tokens", "labels"))
            batches.append((tokens, labels, read["cu_seqlens"][0].tolist()))
        torch.cuda.synchronize()
        begin = wall()
        for batch in batches:
            model(*batch).backward()
        torch.cuda.synchronize()
        seconds.append(wall() - begin)
        for parameter in model.parameters():
            parameter.grad = None
    return seconds


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

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        """The loss: tokens and labels are int64[S], bounds where documents begin, and S."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, bounds)
        return nn.functional.cross_entropy(hidden @ self.embedding.weight.T, labels)


class Layer(nn.Module):
    """Attention within documents, and an MLP."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, hidden: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        """float[S, hidden] to the same."""
        parts = [part.unflatten(-1, (self.heads, -1)) for part in self.qkv(hidden).chunk(3, dim=-1)]
        attend = _varlen if hidden.is_cuda else _one_by_one
        hidden = hidden + self.out(attend(parts, bounds).flatten(1))
        return hidden + self.mlp(hidden)


def _one_by_one(parts: list[torch.Tensor], bounds: list[int]) -> torch.Tensor:
    """Attention of documents, each in a call: float[S, heads, d] three times to float[S, heads, d]."""
    found = []
    for document in zip(*(part.split(np.diff(bounds).tolist()) for part in parts), strict=True):
        query, key, value = (part.transpose(0, 1)[None] for part in document)
        found.append(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)[0].transpose(0, 1))
    return torch.cat(found)


def _varlen(parts: list[torch.Tensor], bounds: list[int]) -> torch.Tensor:
    """The same in one call."""
    from torch.nn.attention.varlen import varlen_attn

    causal: dict[str, Any] = {"is_causal": True}
    if "window_size" in signature(varlen_attn).parameters:  # torch 2.11 and later
        causal = {"window_size": (-1, 0)}
    query, key, value = parts
    where = torch.tensor(bounds, dtype=torch.int32).to(query.device)
    longest = int(np.diff(bounds).max())
    found: Any = varlen_attn(query, key, value, where, where, longest, longest, **causal)
    return torch.as_tensor(found)


def _step(model: Model, stream: Stream, sample: int, rank: int, balance: Balance | None) -> None:
    dataset = StreamDataset(stream, fields=["labels"])
    plan = stream.plan(sample, sample + BATCH)
    for numbers in deal(plan, balance, micro_batch_size=1, dp_rank=rank, dp_size=RANKS):
        batch = dataset.read(numbers.tolist())
        model(batch["tokens"][0], batch["labels"][0], batch["cu_seqlens"][0].tolist()).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad = None


def _work(stream: Stream, sample: int, balance: Balance, *, dealt: bool, shape: Shape, relative: bool = False) -> float:
    """What the slowest rank is predicted to cost; or that by the mean."""
    plan = stream.plan(sample, sample + shape.batch)
    cost, how = costs(plan, balance), balance if dealt else None
    ranks: list[int] = []
    for rank in range(shape.ranks):
        mine = deal(plan, how, micro_batch_size=1, dp_rank=rank, dp_size=shape.ranks)
        ranks.append(sum(int(cost[numbers - sample].sum()) for numbers in mine))
    return max(ranks) / (sum(ranks) / len(ranks)) if relative else max(ranks)


def _token_cost(model: Model, seq_length: int) -> int:
    """As docs/batches.md measures it, with documents of a whole sample and of an eighth."""
    device = model.embedding.weight.device
    tokens = torch.zeros(seq_length, dtype=torch.int64, device=device)
    a, b = seq_length, seq_length // 8
    seconds: dict[int, list[float]] = {a: [], b: []}
    for _ in range(7):
        for length in seconds:
            begin = wall()
            model(tokens, tokens, list(range(0, seq_length + 1, length))).backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[length].append(wall() - begin)
    r = median(seconds[a]) / median(seconds[b])
    for parameter in model.parameters():
        parameter.grad = None
    return max(int((r * b - a) / (1 - r)), 0)


def _barrier() -> float:
    dist.barrier()
    return wall()
