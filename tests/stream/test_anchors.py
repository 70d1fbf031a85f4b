"""Going back is cheap wherever the front is, and few snapshots are kept."""

from __future__ import annotations

import math

from megaresume.stream.config import StreamConfig
from megaresume.stream.cursor import DENSITY, Anchors
from megaresume.stream.planner import Planner
from megaresume.stream.stages import Course
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList

CONFIG = StreamConfig.from_dict(
    {"seq_length": 16, "packing": "best_fit", "sources": {"web": {}, "code": {"weight": 2}}}
)
SOURCES = [LengthList([5, 11, 3, 16, 40, 1, 7]), LengthList([2, 9, 4])]


def test_distance_to_the_anchor_grows_with_the_distance_back_and_no_faster():
    planner = Planner(Course.of(CONFIG), SOURCES)
    anchors = Anchors(planner.snapshot())
    for front in range(1, 3000):
        planner.advance(1)
        anchors.add(planner.snapshot())
        if front % 501 == 0:
            for back in range(front):
                sample = front - back
                found = Planner(Course.of(CONFIG), SOURCES, anchors.before(sample)).position
                assert found <= sample
                assert sample - found <= 2 * (back + 64) / DENSITY + 1
    assert len(anchors) < 64 + DENSITY * (math.log2(3000) + 2)


def test_every_sample_of_a_long_past_is_the_same_again(monkeypatch):
    """State and plan, far behind the kept blocks, while the front goes on undisturbed."""
    monkeypatch.setattr("megaresume.stream.cursor.KEPT_BLOCKS", 2)
    monkeypatch.setattr("megaresume.stream.cursor.BLOCK", 8)
    forward = Stream(CONFIG, SOURCES)
    states = [forward.state_at(n).to_json() for n in range(400)]
    stream = Stream(CONFIG, SOURCES)
    stream.plan(0, 400)
    for n in (399, 250, 3, 0, 311, 16, 384, 383):
        assert stream.state_at(n).to_json() == states[n]
    digests = forward.plan(0, 400).digests.tolist()
    for first in (390, 100, 7, 399):
        assert stream.plan(first, 400).digests.tolist() == digests[first:]


def test_a_state_behind_the_front_does_not_move_the_front(monkeypatch):
    monkeypatch.setattr("megaresume.stream.cursor.KEPT_BLOCKS", 2)
    monkeypatch.setattr("megaresume.stream.cursor.BLOCK", 8)
    stream = Stream(CONFIG, SOURCES)
    stream.plan(0, 1000)
    front = stream._blocks._planner
    stream.state_at(17)
    assert stream._blocks._planner is front and front.position >= 1000


def test_blocks_hold_fewer_samples_where_samples_are_long():
    long = StreamConfig.from_dict({"seq_length": 1 << 20, "sources": {"web": {}}})
    assert Stream(long, [LengthList([5000] * 9)]).block_samples == 4
    assert Stream(CONFIG, SOURCES).block_samples == 1024
