"""Whole documents that fill a sample as well as they can: how full, how long one waits, and in which order."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import pytest

from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import ConfigError
from megaresume.stream.plan import Plan
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
