"""Retries and hits of the cache are those that the server and the cache's files have seen, whoever has read."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from megaresume.data.store_counts import KINDS, SLOTS, Share, store_counts
from tests.data.far import Request, serve, wait_for_threads
from tests.data.test_ahead import batches, shards  # noqa: F401

pytest.importorskip("aiohttp")

WORKERS = [
    {},
    {"read_ahead": 0},
    pytest.param({"num_workers": 2}, marks=pytest.mark.process),
    pytest.param({"num_workers": 2, "start_method": "spawn"}, marks=pytest.mark.process),
]


@pytest.fixture(autouse=True)
def nobody_reads_ahead() -> None:
    """Attempts of earlier tests at servers that are gone would be counted too."""
    wait_for_threads()


class Counted:
    """What was counted since this was made."""

    def __init__(self) -> None:
        self._before = {kind: store_counts.total(kind) for kind in KINDS}

    def __call__(self) -> dict[str, int]:
        return {kind: store_counts.total(kind) - self._before[kind] for kind in KINDS}


def busy(reads: list[bool]) -> Callable[[int, Request], int | None]:
    """Every fifth read is answered with 503. After such an answer to HEAD, fsspec would ask again by itself.

    Args:
        reads: of each, whether it was refused.
    """

    def fault(number: int, request: Request) -> int | None:
        if request.method != "GET":
            return None
        reads.append(len(reads) % 5 == 1)
        return 503 if reads[-1] else None

    return fault


@pytest.mark.parametrize("options", WORKERS)
def test_what_workers_have_tried_again_is_counted(shards, options: dict[str, Any]) -> None:  # noqa: F811
    reads: list[bool] = []
    counted = Counted()
    with serve(shards, fault=busy(reads)) as far:
        assert batches(shards, far.url, stop=8, **options) == batches(shards, stop=8)
    assert counted() == {"retries": sum(reads), "hits": 0, "misses": 0}
    assert any(reads)


@pytest.mark.parametrize("options", WORKERS[:3])
def test_hits_of_the_cache(shards, tmp_path, options: dict[str, Any]) -> None:  # noqa: F811
    with serve(shards) as far:
        counted = Counted()
        batches(shards, far.url, cache_dir=tmp_path / "cache", **options)
        records = len(far.reads)
        assert counted() == {"retries": 0, "hits": 0, "misses": records}
        counted = Counted()
        batches(shards, far.url, cache_dir=tmp_path / "cache", **options)
        assert counted() == {"retries": 0, "hits": records, "misses": 0}


def read(connection: Any, share: Share | None, worker: int) -> None:
    """A worker that counts two, and waits to be killed."""
    if share is not None:
        store_counts.begin_worker(share, worker)
    store_counts.add("hits")
    store_counts.add("retries")
    connection.send(store_counts.total("hits"))
    signal.pause()


@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_that_is_killed_has_counted_and_the_next_one_goes_on(method: str) -> None:
    context = multiprocessing.get_context(method)
    counted = Counted()
    for k in range(3):
        here, there = context.Pipe()
        share = None if method == "fork" else store_counts.share(2)
        process = context.Process(target=read, args=(there, share, 1))
        process.start()
        assert here.recv() == 1  # of its own: nothing of what this process has counted
        assert counted() == {"retries": k + 1, "hits": k + 1, "misses": 0}
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    assert counted() == {"retries": 3, "hits": 3, "misses": 0}


def test_more_processes_than_slots() -> None:
    counted = Counted()
    share = store_counts.share(2 * SLOTS)
    for worker in range(2 * SLOTS):
        share.add(worker, KINDS.index("misses"))
    assert counted()["misses"] == 2 * SLOTS
