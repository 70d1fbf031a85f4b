"""The shuffle in two levels: one for every size, local, invertible, the same wherever it is asked from."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from megaresume.stream.config import OnChange, StreamConfig
from megaresume.stream.data_yaml import ShuffleConfig
from megaresume.stream.errors import ConfigError, StateError
from megaresume.stream.permutation import items_at
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList, assert_exact_resume
from tests.stream.orders import document_at, order_of, position_of
from tests.stream.reference import epoch_order


@pytest.mark.parametrize(("block", "window"), list(product([1, 2, 3, 7, 16], [1, 2, 5])))
def test_whole_epochs_equal_the_slow_model(block: int, window: int) -> None:
    shuffle = ShuffleConfig(block=block, window=window)
    for num in [*range(1, 40), 100, 127, 128, 129]:
        order = list(epoch_order(num, 3, "web", num % 3, shuffle))
        assert sorted(order) == list(range(num))
        assert items_at(np.arange(num), num, 3, "web", num % 3, shuffle).tolist() == order


def test_any_range_is_part_of_the_whole() -> None:
    shuffle = ShuffleConfig(block=10, window=3)
    whole = items_at(np.arange(1003), 1003, 1, "web", 4, shuffle).tolist()
    for start, stop in [(0, 1), (29, 31), (30, 60), (17, 999), (1002, 1003), (500, 500)]:
        assert items_at(np.arange(start, stop), 1003, 1, "web", 4, shuffle).tolist() == whole[start:stop]


def test_a_source_that_was_away_comes_back_in_its_own_order_only() -> None:
    """Its epoch is not over: another shuffle would repeat a part of it."""
    both = {"web": {"shuffle": BLOCKS}, "code": {}}

    def stream(sources: dict[str, object], state: StreamState | None = None) -> Stream:
        config = StreamConfig.from_dict(CONFIG | {"packing": "none", "sources": sources})
        return Stream(config, [LengthList([60] * 100) for _ in sources], state=state, on_change="stage")

    away = stream({"code": {}}, stream(both).state_at(20))
    state = stream({"code": {}}, away.state_at(30)).state_at(40)
    stream(both, state).plan(40, 41)
    with pytest.raises(StateError, match=r"would be repeated"):
        stream(both | {"web": {}}, state)


@pytest.mark.parametrize("num", [1, 9, 10, 11, 997, 10**9 + 7])
def test_inverse(num: int) -> None:
    order = order_of(num, 5, "web", ShuffleConfig(block=10, window=3))
    for index in sorted({0, num // 2, num - 1, min(num - 1, 31)}):
        position = 2 * num + index
        epoch, document = document_at(position, order)
        assert (epoch, position_of(document, order, 2)) == (2, position)


def test_few_blocks_are_read_at_a_time() -> None:
    shuffle = ShuffleConfig(block=100, window=4)
    order = items_at(np.arange(10_000), 10_000, 1, "web", 0, shuffle)
    for first in range(0, 10_000, 400):
        assert len(np.unique(order[first : first + 400] // 100)) <= 4 + 1
    # Without a window of several blocks neighbours of a shard would fill a batch.
    assert len(np.unique(order[:64] // 100)) == 4


def test_epochs_seeds_and_windows_are_unrelated() -> None:
    shuffle = ShuffleConfig(block=8, window=2)
    keys = product((1, 2), (0, 1))
    orders = [items_at(np.arange(64), 64, seed, "web", epoch, shuffle).tolist() for seed, epoch in keys]
    assert len({tuple(order) for order in orders}) == 4
    places = [[d % 8 for d in orders[0][first : first + 16]] for first in range(0, 64, 16)]
    assert len({tuple(p) for p in places}) == 4


CONFIG = {
    "seed": 7,
    "seq_length": 64,
    "packing": "best_fit",
    "sources": {"web": {"shuffle": {"block": 8, "window": 2}}},
}


BLOCKS = {"block": 8, "window": 2}


def _stream(shuffle: object, state: StreamState | None = None, on_change: OnChange = "refuse") -> Stream:
    config = StreamConfig.from_dict(CONFIG | {"sources": {"web": {} if shuffle is None else {"shuffle": shuffle}}})
    source = LengthList([5 + (i * 7) % 50 for i in range(100)])
    return Stream(config, [source], state=state, on_change=on_change)


def test_a_stream_over_blocks_resumes_at_every_sample() -> None:
    assert_exact_resume(lambda state: _stream(BLOCKS, state), num_samples=120)


def test_the_order_of_documents_is_that_of_the_shuffle() -> None:
    plan = _stream(BLOCKS).plan(0, 10)
    positions, documents = plan.table[:, 1], plan.table[:, 2]
    order = items_at(np.arange(100), 100, 7, "web", 0, ShuffleConfig(block=8, window=2))
    assert documents.tolist() == order[positions].tolist()


@pytest.mark.parametrize("other", [None, {"block": 8, "window": 3}, {"block": 9, "window": 2}])
@pytest.mark.parametrize("on_change", ["refuse", "stage"])
def test_another_shuffle_is_refused(other: object, on_change: OnChange) -> None:
    state = _stream(BLOCKS).state_at(20)
    with pytest.raises(StateError, match=r"shuffle") as error:
        _stream(other, state, on_change)
    assert "would be repeated" in str(error.value)


@pytest.mark.parametrize("shuffle", [{"window": 0}, {"block": 0}, {"block": 4, "size": 1}, "block", {"block": "8"}])
def test_bad_shuffles(shuffle: object) -> None:
    with pytest.raises(ConfigError, match=r"sources\.web\.shuffle"):
        StreamConfig.from_dict(CONFIG | {"sources": {"web": {"shuffle": shuffle}}})


def test_full_is_the_default() -> None:
    assert _stream("full").config == _stream(None).config


def test_blocks_come_close_to_the_full_shuffle() -> None:
    """Pairs of records of one shard in a batch: no more than by chance. The default once held 8 blocks in a batch."""
    assert _stream("blocks").config.sources[0].shuffle == ShuffleConfig(block=32, window=2048)
    assert _stream({"block": 32}).config == _stream("blocks").config == _stream({"window": 2048}).config
    records, of_shard, batch = 1 << 18, 1 << 10, 256
    config = StreamConfig.from_dict(
        {"seed": 7, "seq_length": 1, "packing": "none", "sources": {"web": {"shuffle": "blocks"}}}
    )
    order = Stream(config, [LengthList(np.ones(records, np.int64))]).plan(0, records).table[:, 2]
    assert np.array_equal(np.sort(order), np.arange(records))
    shards = np.sort((order // of_shard).reshape(-1, batch), axis=1)
    distinct = 1 + (np.diff(shards, axis=1) > 0).sum(axis=1)
    by_chance = (records // of_shard) * (1 - (1 - of_shard / records) ** batch)
    assert distinct.mean() > 0.95 * by_chance
