"""Data that ends within a step: what can be given to every rank is trained, and the rest is said. In this process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from itertools import chain, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import megaresume
from megaresume import BatchSchedule, Checkpoints
from megaresume.checkpoint.metrics.clocks import Clocks
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.hosts.feeds import Feed, ItemFeed, StreamFeed, micro_batches
from megaresume.hosts.steps import Steps
from megaresume.program import main
from tests.hosts.conftest import write_corpus

SEQ_LENGTH = 8


class Documents:
    """Each as long as a sample."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def length(self, i: int) -> int:
        return SEQ_LENGTH

    def get(self, i: int) -> Any:
        return np.full(SEQ_LENGTH, i)


def stream_of(samples: int) -> Any:
    config = {"seed": 3, "seq_length": SEQ_LENGTH, "sources": {"notes": {"object": "notes", "max_epochs": 1}}}
    return megaresume.open_stream(config, objects={"notes": Documents(samples)})


def steps_of(feed: Feed) -> Steps:
    steps = Steps(feed)
    steps.session = SimpleNamespace(step_begins=lambda: None, clocks=Clocks())  # type: ignore[assignment]
    return steps


def samples_of(steps: Steps, batch: Any) -> list[int]:
    """Of a micro-batch of a stream, as it says, and as a trainer is told of one that does not."""
    assert list(steps.numbers()) == batch["samples"].tolist()
    return list(steps.numbers())


def trained(steps: Steps, numbers: Callable[[Any], list[int]]) -> list[list[list[int]]]:
    """By step, what this rank was given in each micro-batch."""
    found: list[list[list[int]]] = [[]]
    for batch in steps:
        found[-1].append(numbers(batch))
        if steps.is_whole:
            steps.stepped()
            found.append([])
    assert not found[-1] and not any(True for _ in steps)
    return found[:-1]


@pytest.mark.parametrize("balance", [None, megaresume.Balance()])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("samples", "ranks", "micro", "accumulation", "left"),
    [
        (10, 1, 2, 2, 0),
        (11, 1, 2, 2, 0),
        (14, 2, 2, 2, 0),
        (15, 2, 2, 2, 0),
        (13, 2, 2, 2, 0),
        (9, 2, 2, 2, 1),
        (7, 2, 1, 2, 1),
        (23, 3, 4, 1, 0),
    ],
)
def test_a_stream(
    samples: int,
    ranks: int,
    micro: int,
    accumulation: int,
    left: int,
    prefetch: int,
    balance: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    schedule, of_ranks, states = BatchSchedule.constant(micro * ranks * accumulation), [], []
    for rank in range(ranks):
        options: dict[str, Any] = {"dp_rank": rank, "dp_size": ranks, "prefetch": prefetch, "balance": balance}
        feed = StreamFeed(megaresume.StreamLoader(stream_of(samples), schedule, micro_batch_size=micro, **options))
        steps = steps_of(feed)
        of_ranks.append(trained(steps, functools.partial(samples_of, steps)))
        states.append(feed.snapshot(steps.samples).to_dict())
    assert all(state == states[0] for state in states) and states[0]["samples"] == samples - left
    counts = [[len(step) for step in rank] for rank in of_ranks]
    assert all(count == counts[0] for count in counts)  # of micro-batches: otherwise a rank would wait for ever
    last = [step[-1] for step in (rank[-1] for rank in of_ranks)]
    assert max(map(len, last)) - min(map(len, last)) <= 1 and all(last)
    size = schedule.size_at(0)
    for number, step in enumerate(zip(*of_ranks, strict=True)):
        given = list(chain.from_iterable(chain.from_iterable(zip_longest(*step, fillvalue=[]))))
        expected = list(range(number * size, min((number + 1) * size, samples - left)))
        assert (given if balance is None else sorted(given)) == expected
    said = {record.message for record in caplog.records if record.levelno == logging.WARNING}
    text = f"megaresume: the last {left} samples of the stream are not trained: there are {ranks} ranks"
    assert said == ({text} if left else set())


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("micro", "accumulation"), [(1, 1), (1, 3), (2, 2), (3, 1), (2, 4)])
def test_items(ranks: int, micro: int, accumulation: int) -> None:
    """Every rank has as many micro-batches as trainers are told of; together they have what can be dealt out."""
    step = ranks * micro * accumulation
    for number in range(step, 2 * step):
        options: dict[str, Any] = {"accumulation": accumulation, "max_epochs": 1, "dp_size": ranks, "seed": 3}
        loaders = [megaresume.DataLoader(torch.arange(number), micro, dp_rank=rank, **options) for rank in range(ranks)]
        of_ranks = [trained(steps_of(ItemFeed(loader)), lambda batch: batch.tolist()) for loader in loaders]
        flat = [list(chain.from_iterable(rank)) for rank in of_ranks]
        assert {len(batches) for batches in flat} == {micro_batches(loaders[0], number)}
        assert all(1 <= len(batch) <= micro for batches in flat for batch in batches)
        given = [item for batches in zip(*flat, strict=True) for batch in batches for item in batch]
        rest = number % step
        left = rest % ranks if micro == 1 else rest if rest < ranks else 0
        order = megaresume.DataLoader(torch.arange(number), max_epochs=1, seed=3, dp_rank=0, dp_size=1)
        assert given == [int(item) for item in order][: number - left]
        assert {loader.samples for loader in loaders} == {number - left}


def test_items_that_are_left_out_are_said(caplog: pytest.LogCaptureFixture) -> None:
    """Also if nothing is read ahead."""
    loader = megaresume.DataLoader(torch.arange(7), 1, max_epochs=1, dp_rank=0, dp_size=2)
    given = trained(steps_of(ItemFeed(loader)), lambda batch: batch.tolist())
    assert len(given) == 3
    assert "the last 1 items of the stream are not trained: there are 2 ranks" in caplog.text


def test_where_steps_are_whole(caplog: pytest.LogCaptureFixture) -> None:
    """As torchtitan's are."""
    loader = megaresume.StreamLoader(stream_of(11), BatchSchedule.constant(4), micro_batch_size=4, prefetch=0)
    given = trained(steps_of(StreamFeed(loader, whole_steps=True)), lambda batch: batch["samples"].tolist())
    assert given == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert "the last 3 samples of the stream are not trained: a step has 4" in caplog.text


def test_a_run_to_its_end(tmp_path: Path) -> None:
    write_corpus(tmp_path / "web", documents=20, seed=1)
    config = {"seed": 1, "seq_length": 64, "sources": {"web": {"path": str(tmp_path / "web"), "max_epochs": 1}}}
    run, seen = tmp_path / "run", []
    for attempt in range(2):
        model = torch.nn.Linear(1, 1)
        stream = megaresume.open_stream(config)
        loader = megaresume.StreamLoader(stream, BatchSchedule.constant(8), micro_batch_size=2)
        loop = megaresume.attach({"model": model}, loader, checkpoints=Checkpoints(save_dir=run))
        resume = loop.load()
        for batch in loop:
            seen += batch["samples"].tolist()
            if loop.ends_step:
                loop.stepped()
                loop.save()
        if attempt:
            assert resume is not None and resume.samples == len(seen)
        loop.finish()
    assert seen == list(range(len(seen))) and len(seen) % 8  # a short step is the last
    entries = read_ledger(ledger_path(run)).entries
    steps = -(-len(seen) // 8)
    assert [(e.iteration, e.samples) for e in entries if e.kind == "finished"] == [(steps, len(seen))] * 2
    assert main(["verify", str(run)]) == 0
