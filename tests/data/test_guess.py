"""Records of shards that are far away, for a loader that does not say which samples it will ask for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from torch.utils.data import DataLoader

from megaresume.batches.loader import StreamDataset
from megaresume.batches.open import open_stream
from megaresume.batches.workers import whole
from megaresume.data import read_ahead, remote
from megaresume.data.prepare.shards import prepare_shards
from tests.data.far import serve
from tests.data.kit import encoder, write_shards

pytest.importorskip("aiohttp")


@pytest.fixture
def shards(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(read_ahead, "GAP", -1)  # each record is a request
    monkeypatch.setattr("megaresume.batches.ahead.FARTHEST", 12)  # not into the next epoch
    write_shards(tmp_path / "shards", [40, 30, 50])
    prepare_shards([tmp_path / "shards/*.tar"], tmp_path / "pairs", encoder())
    return tmp_path / "shards"


def dataset(shards, url=None) -> StreamDataset:
    source = {"kind": "webdataset", "index": str(shards.parent / "pairs.shards.idx")}
    if url is not None:
        source["path"] = [f"{url}/{path.name}" for path in sorted(shards.iterdir())]
    return StreamDataset(open_stream({"seed": 3, "seq_length": 96, "packing": "none", "sources": {"pairs": source}}))


def read(data, micro_batches):
    loader = DataLoader(data, batch_sampler=micro_batches, collate_fn=whole)
    return [(b["samples"].tolist(), b["tokens"].numpy().tobytes(), b["pixel_values"].numpy().tobytes()) for b in loader]


def close(data) -> None:
    if data._ahead is not None:
        data._ahead.close()


ORDERS = {
    "consecutive": [[k, k + 1] for k in range(0, 40, 2)],
    "a rank of three": [[k, k + 1] for k in range(2, 80, 6)],
    "balanced": [[0, 3], [1, 2], [7, 4], [5, 6], [8, 11], [10, 9]],
    "a ramp-up": [[0], [4], [8], [12, 13], [20, 21], [28, 29], [36, 37, 38, 39], [52, 53, 54, 55]],
    "backwards": [[60, 61], [62, 63], [4, 5], [6, 7], [8, 9], [2, 3]],
    "to the very end": [[k, k + 1] for k in range(70, 100, 2)],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_batches_are_those_of_local_shards(shards, order):
    with serve(shards) as far:
        data = dataset(shards, far.url)
        assert read(data, order) == read(dataset(shards), order)
        close(data)


@pytest.mark.parametrize("order", ["consecutive", "a rank of three"])
def test_what_comes_is_requested_before_several_at_a_time_and_once(shards, order):
    with serve(shards, latency=0.02) as far:
        data = dataset(shards, far.url)
        read(data, ORDERS[order])
        close(data)
    assert far.most >= 6
    assert len({(r.name, r.start) for r in far.reads}) == len(far.reads)


def test_a_micro_batch_that_nobody_could_guess_is_requested_together(shards):
    order = [[0, 9, 4, 21], [50, 3, 33, 12], [7, 60, 44, 20]]
    assert all(b[0] - a[-1] for a, b in pairwise(order))
    with serve(shards, latency=0.02) as far:
        data = dataset(shards, far.url)
        assert read(data, order) == read(dataset(shards), order)
        close(data)
    assert far.most >= 3
