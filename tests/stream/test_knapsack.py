"""Whole documents that fill a sample as well as they can: how full, how long one waits, and in which order."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import pytest

from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import ConfigError
from megaresume.stream.planner import Plan
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList

SEQ_LENGTH = 8192
RNG = np.random.default_rng(0)
NUM = 20_000
#: documents of one image and a text beside it, in tokens.
IMAGES = {
    "any size": RNG.integers(100, 4001, NUM) + RNG.integers(10, 200, NUM),
    "mostly small": np.clip(RNG.lognormal(6.5, 0.9, NUM).astype(int), 100, 4000) + RNG.integers(10, 200, NUM),
    "tiles of 256": 256 * RNG.integers(1, 14, NUM) + RNG.integers(10, 120, NUM),
}


def _plan(lengths: np.ndarray, num_samples: int, **packing: int) -> Plan:
    data = {"seq_length": SEQ_LENGTH, "packing": {"mode": "knapsack", **packing}, "sources": {"pairs": {}}}
    return Stream(StreamConfig.from_dict(data), [LengthList(lengths)]).plan(0, num_samples)


def _best_fit_decreasing(lengths: np.ndarray) -> int:
    """Samples that the offline algorithm needs."""
    num, room = 0, [0]
    for length in sorted(lengths.tolist(), reverse=True):
        at = bisect_left(room, length)
        if at == len(room):
            num += 1
            insort(room, SEQ_LENGTH - length)
        else:
            insort(room, room.pop(at) - length)
    return num


@pytest.mark.parametrize("name", IMAGES)
def test_at_least_as_full_as_offline_less_half_a_point(name: str) -> None:
    plan = _plan(IMAGES[name], 1500)
    lengths = plan.table[:, 4]
    offline = lengths.sum() / (_best_fit_decreasing(lengths) * SEQ_LENGTH)
    assert lengths.sum() / (len(plan) * SEQ_LENGTH) > offline - 0.005


def test_nothing_is_cut_or_lost_and_nothing_waits_too_long() -> None:
    lengths = IMAGES["any size"][:3000].copy()
    lengths[::10] = 8100  # fills a sample alone, or with nothing that is there
    plan = _plan(lengths, 400, lookahead=32, max_age=50)
    assert (plan.table[:, 3] == 0).all()
    assert plan.table[:, 4].tolist() == lengths[plan.table[:, 2]].tolist()
    # Positions drawn one after another: behind the last that is out, only those that wait are missing.
    positions = np.sort(plan.table[:, 1])
    assert len(positions) + 33 > positions[-1]
    sample = np.repeat(np.arange(len(plan)), np.diff(plan.starts))
    # seen: int64[n], samples that were closed before the position was drawn, at the earliest.
    drawn = np.maximum.accumulate(np.array([plan.table[: plan.starts[k + 1], 1].max() for k in range(len(plan))]))
    waited = sample - np.searchsorted(drawn, plan.table[:, 1])
    assert waited.max() <= 50 + 32


def test_segments_lie_in_the_order_in_which_they_were_drawn() -> None:
    plan = _plan(IMAGES["any size"], 50)
    for k in range(50):
        positions = plan.table[plan.starts[k] : plan.starts[k + 1], 1].tolist()
        assert positions == sorted(positions)


@pytest.mark.parametrize("packing", [{"lookahead": 0}, {"lookahead": 1025}, {"lookahead": "8"}, {"max_age": 0}])
def test_bad_values(packing: dict) -> None:
    with pytest.raises(ConfigError, match="bad value of packing"):
        StreamConfig.from_dict({"seq_length": 8, "packing": {"mode": "knapsack", **packing}, "sources": {"a": {}}})


@pytest.mark.parametrize(
    ("seq_length", "mean", "num"), [(8192, 100, 200), (32768, 300, 100), (131072, 600, 20), (131072, 20, 20)]
)
def test_full_however_short_documents_are(seq_length: int, mean: int, num: int) -> None:
    """And whole: nothing is cut."""
    lengths = np.random.default_rng(mean).exponential(mean, 100_000).astype(int) + 1
    data = {"seq_length": seq_length, "packing": "knapsack", "sources": {"a": {}}}
    plan = Stream(StreamConfig.from_dict(data), [LengthList(lengths)]).plan(0, num)
    assert plan.tokens().sum() >= 0.99 * num * seq_length
    assert (plan.table[:, 3] == 0).all() and plan.table[:, 4].tolist() == lengths[plan.table[:, 2]].tolist()


@pytest.mark.parametrize("open_bins", [16, 128])
def test_best_fit_holds_few_tiny_documents(open_bins: int) -> None:
    """What is open is bounded by segments: memory, state and resume of tiny documents in long samples."""
    lengths = np.random.default_rng(1).exponential(20, 100_000).astype(int) + 1
    data = {
        "seq_length": 131072,
        "packing": {"mode": "best_fit", "open_bins": open_bins},
        "sources": {"a": {}, "b": {"weight": 0.37}},
    }
    stream = Stream(StreamConfig.from_dict(data), [LengthList(lengths), LengthList(lengths[::-1])])
    plan = stream.plan(0, 200)
    assert plan.tokens().sum() >= 0.999 * 200 * 131072
    for sample in range(190, 200):
        state = stream.state_at(sample)
        assert sum(len(b.segments) for b in state.bins) < 16_000 and len(state.to_json()) < 1 << 16
    kept = sum(block.nbytes for block in stream._blocks.kept)
    assert kept <= 32 << 20
