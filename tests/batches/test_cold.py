"""Tokens that are asked for before they are read: of files dropped from memory, and what the system is told of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from itertools import count, islice

import numpy as np
import pytest
import torch

from benchmarks.corpora import document_lengths, write_corpus
from megaresume.batches import cold_pages
from megaresume.batches.ahead import Guess
from megaresume.batches.loader import StreamDataset, StreamLoader
from megaresume.batches.open import open_stream
from megaresume.data.layout import bin_path
from megaresume.stream.batches import BatchSchedule

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="others are told nothing")
LENGTH = 1024
libc = ctypes.CDLL(None)
libc.madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
libc.mincore.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_char_p)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("cold") / "web", document_lengths(20_000, seed=3))


class Kernel:
    """The system's, and what it was told: (start, stop, advice)."""

    def __init__(self, deaf: bool = False) -> None:
        self.told: list[tuple[int, int, int]] = []
        self.deaf = deaf

    def madvise(self, start, size, advice):
        self.told.append((start, start + size, advice))
        return 0 if self.deaf and advice == mmap.MADV_WILLNEED else libc.madvise(start, size, advice)

    @property
    def asked(self) -> list[range]:
        """Addresses that it was told to read."""
        return [
            range(start, stop)
            for start, stop, how in self.told
            if how in (mmap.MADV_WILLNEED, cold_pages.POPULATE_READ)
        ]


@pytest.fixture
def kernel(monkeypatch):
    """Of a machine whose memory holds nothing: every look meets a page that is not there."""
    kernel, waited = Kernel(), count()
    monkeypatch.setattr(cold_pages, "_libc", kernel)
    monkeypatch.setattr(cold_pages, "_waits", lambda: next(waited))
    monkeypatch.setattr(cold_pages, "QUICK", 0)
    return kernel


def loader_of(corpus, *, micro=4, dp=(0, 1), **options):
    source = {"path": str(corpus), "shuffle": options.pop("shuffle", "full")}
    data = {"seed": 3, "seq_length": LENGTH, "packing": "split", "sources": {"web": source}}
    schedule = BatchSchedule.constant(micro * dp[1])
    layout = {"micro_batch_size": micro, "dp_rank": dp[0], "dp_size": dp[1]}
    return StreamLoader(open_stream(data), schedule, **layout, **({"prefetch": 0} | options))


def places(stream, samples):
    """Addresses of the first and the last token of each segment."""
    source = stream.sources[0]
    base = source.token_view.ctypes.data
    for sample in samples:
        for _, _, document, offset, length in stream.plan(sample, sample + 1).table.tolist():
            start = int(source.token_starts(np.array([document]))[0]) + offset
            yield base + start * 4, base + (start + length) * 4 - 1


def resident(address) -> bool:
    state = ctypes.create_string_buffer(1)
    assert not libc.mincore(address // mmap.PAGESIZE * mmap.PAGESIZE, 1, state)
    return bool(state.raw[0] & 1)


def drop(corpus) -> None:
    with open(bin_path(corpus), "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rows(batches, num):
    return [batch["tokens"].clone() for batch in islice(batches, num)]


@pytest.mark.parametrize("dp", [(0, 1), (1, 2)])
def test_all_is_asked_for_before_it_is_read(corpus, kernel, dp):
    loader = loader_of(corpus, dp=dp, num_workers=0)
    batches = iter(loader)
    samples = [sample for batch in islice(batches, 40) for sample in batch["samples"].tolist()]
    told = kernel.asked
    step = dp[1] * 4
    next_ones = [samples[-1] + dp[1] * 4 - 3 + k + i * step for i in range(8) for k in range(4)] if dp[1] > 1 else []
    next_ones = next_ones or range(samples[-1] + 1, samples[-1] + 33)
    for first, last in places(loader.stream, [*samples, *next_ones]):
        assert any(first in asked for asked in told) and any(last in asked for asked in told)
    bound = [place for sample in [samples[-1] + 5000] for place in places(loader.stream, [sample])]
    assert not all(any(first in asked for asked in told) for first, _ in bound), "not all of the corpus"


def test_documents_of_a_block_are_asked_for_together(corpus, kernel):
    loader = loader_of(corpus, shuffle={"block": 64, "window": 8})
    samples = [sample for batch in islice(loader, 100) for sample in batch["samples"].tolist()]
    ends, asked = list(places(loader.stream, samples)), kernel.asked
    for first, last in ends:
        assert any(first in told for told in asked) and any(last in told for told in asked)
    assert len(asked) < len(ends) // 2
    once = np.unique(np.concatenate([np.arange(told.start, told.stop, mmap.PAGESIZE) for told in asked]))
    assert sum(map(len, asked)) < 2 * mmap.PAGESIZE * len(once)


def test_nothing_is_read_around_what_is_asked_for(corpus, monkeypatch):
    monkeypatch.setattr(cold_pages.ColdPages, "_ask", lambda *_: None)
    batches = iter(loader := loader_of(corpus))
    view = loader.stream.sources[0].token_view
    pages = range(view.ctypes.data, view.ctypes.data + view.nbytes, mmap.PAGESIZE)
    drop(corpus)
    before = sum(map(resident, pages))
    if before == len(pages):
        pytest.skip("a file system that keeps its files in memory")
    rows(batches, 4)
    wanted = [(last - first) // mmap.PAGESIZE + 2 for first, last in places(loader.stream, range(16))]
    assert sum(map(resident, pages)) - before <= 2 * sum(wanted)


@pytest.mark.parametrize("deaf", [False, True], ids=["told", "a file system that does nothing if told"])
@pytest.mark.parametrize("options", [{}, {"prefetch": 2}, {"dp": (1, 3)}, {"micro": 1}])
def test_batches_are_the_same(corpus, kernel, deaf, options, monkeypatch):
    found = rows(loader_of(corpus, **options), 60)
    monkeypatch.setattr(cold_pages.ColdPages, "begin", lambda *_: None)
    monkeypatch.setattr(cold_pages.ColdPages, "end", lambda *_: None)
    expected = rows(loader_of(corpus, **options), 60)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_comes_next_is_in_memory(corpus):
    loader = loader_of(corpus)
    drop(corpus)
    batches = iter(loader)
    next(batches)
    if all(resident(first) for first, _ in places(loader.stream, range(5000, 5100))):
        pytest.skip("a file system that keeps its files in memory")
    last = [batch["samples"].tolist() for batch in islice(batches, 30)][-1][-1]
    deadline = time.monotonic() + 20
    for ends in places(loader.stream, range(last + 1, last + 41)):
        while not all(map(resident, ends)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(map(resident, ends))


def test_what_is_in_memory_is_not_asked_for(corpus, monkeypatch):
    kernel = Kernel()
    monkeypatch.setattr(cold_pages, "_libc", kernel)
    monkeypatch.setattr(cold_pages, "_waits", lambda: 0)
    monkeypatch.setattr(cold_pages, "QUICK", 0)
    batches = iter(loader_of(corpus))
    # Each look is at some steps that are read together, more of them where that is quick.
    assert any(rows(batches, 10) and kernel.told[-1][2] == mmap.MADV_NORMAL for _ in range(20))
    told = len(kernel.told)
    assert told < 3000
    rows(batches, 60)
    assert len(kernel.told) == told
    waited = count()
    monkeypatch.setattr(cold_pages, "_waits", lambda: next(waited))  # and then it is in memory no more
    assert any(rows(batches, 10) and len(kernel.told) > told for _ in range(20))


def test_a_file_system_that_does_nothing_if_told_is_read_by_threads(corpus, monkeypatch):
    kernel, waited = Kernel(deaf=True), count(step=1000)
    monkeypatch.setattr(cold_pages, "_libc", kernel)
    monkeypatch.setattr(cold_pages, "_waits", lambda: next(waited))
    monkeypatch.setattr(cold_pages, "QUICK", 0)
    rows(loader_of(corpus), 60)
    first = next(k for k, (_, _, advice) in enumerate(kernel.told) if advice == cold_pages.POPULATE_READ)
    assert all(advice == cold_pages.POPULATE_READ for _, _, advice in kernel.told[first:])
    assert kernel.told[first:]


def test_damage_further_on_does_not_come_early(corpus, kernel):
    loader = loader_of(corpus)
    batches = iter(loader)
    expected = rows(loader_of(corpus), 12)
    next(batches)

    def broken(first, stop):
        if stop > 100:
            raise ValueError("what a plan of later samples meets")
        return plan(first, stop)

    plan = loader.dataset.stream.plan
    loader.dataset.stream.plan = broken
    found = rows(batches, 11)
    assert all(torch.equal(a, b) for a, b in zip(found, expected[1:], strict=True))


def test_a_forked_process_asks_for_itself(corpus):
    dataset = StreamDataset(loader_of(corpus).stream)
    before = dataset.assembler
    dataset._owner = -1  # as it is after a fork
    assert dataset.assembler is not before


def test_places_are_joined_and_cut():
    page, big = mmap.PAGESIZE, cold_pages.LONGEST
    starts = np.array([10 * big, page + 5, 3, 2 * page + 7])
    stops = starts + np.array([big + 1, 10, 5, 4])
    assert list(cold_pages.joined(starts, stops)) == [
        (0, 2 * page + 11),
        (10 * big, 11 * big),
        (11 * big, 11 * big + 1),
    ]
    apart = np.array([0, 3 * page + cold_pages.GAP])
    assert len(list(cold_pages.joined(apart, apart + 1))) == 2


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([[0, 1], [2, 3]], [[4, 5], [6, 7]]),
        ([[8, 9], [24, 25]], [[40, 41], [56, 57]]),
        ([[0, 1, 8, 9], [16, 17, 24, 25]], [[32, 33], [40, 41]]),
        ([[0], [16], [1], [32]], [[48], [64]]),  # one that asks for the sample after another one, too
        ([[0, 1], [2, 3], [100, 101], [104, 105]], [[108, 109], [112, 113]]),
        ([[0, 1], [4, 5], [8, 9], [12, 13, 14, 15], [20, 21, 22, 23]], [[28, 29, 30, 31], [36, 37, 38, 39]]),
    ],
)
def test_guess(asked, expected):
    guess = Guess()
    for samples in asked:
        guess.follow(samples)
    assert [list(run) for run in islice(guess.runs(guess.next), 2)] == expected
    assert guess.follow(expected[0]) and guess.follow(expected[1])
    assert not guess.follow([10_000])
