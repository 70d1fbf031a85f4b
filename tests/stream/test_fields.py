"""The segments of a state: their text, which a compiled loop writes, and what it is read as."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from megaresume.stream.fields import _segments
from megaresume.stream.kernel import DOCUMENT
from megaresume.stream.state import Bin, Segment, StreamState
from megaresume.stream.state_text import LazyTuple
from megaresume.stream.stream import Stream

MOST = 2**63 - 1


def test_numbers_are_written_as_json_writes_them() -> None:
    """Around every power of ten, in every column, and the largest: the room for the text is just enough for it."""
    numbers = [0, *(10**k + d for k in range(19) for d in (-1, 0, 1)), *[MOST] * 300]
    rows = np.array([np.roll(numbers, k) for k in range(5)], np.int64).T
    found, expected = _segments(rows), np.delete(rows, DOCUMENT, axis=1).tolist()
    assert isinstance(found, LazyTuple) and found.text == json.dumps(expected, separators=(",", ":"))
    assert found == tuple(Segment(*row) for row in expected)
    assert _segments(rows[:0]) == ()


@pytest.mark.parametrize("packing", ["best_fit", "split", "knapsack"])
def test_a_state_that_was_never_looked_into_is_the_one_that_was(stream_of: Callable[..., Stream], packing: str) -> None:
    """Its text, the state that is read of it, and the tuples that are made of it: compared both ways."""
    data = {"seq_length": 64, "packing": packing, "sources": {"a": {}, "b": {}}}
    stream = stream_of(data, {"a": [3, 90, 5, 41, 7], "b": [11, 64, 2, 150]})
    waiting = 0
    for sample in range(0, 90, 7):
        state, again = stream.state_at(sample), stream.state_at(sample)
        read = StreamState.from_json(state.to_json())
        assert again.waiting == read.waiting
        assert state == read and read == state and again.to_json() == read.to_json() == state.to_json()
        assert all(type(b) is Bin and type(s) is Segment for b in state.bins for s in b.segments)
        waiting += len(read.waiting)
    assert waiting


def test_the_fields_of_a_state_can_be_written_as_json(stream_of: Callable[..., Stream]) -> None:
    stream = stream_of({"seq_length": 64, "packing": "best_fit", "sources": {"a": {}}}, {"a": [3, 90, 5, 41, 7]})
    state = stream.state_at(5)
    assert state.bins and hash(state.bins) == hash(StreamState.from_json(state.to_json()).bins)
    fields = json.loads(json.dumps(dataclasses.asdict(state)))
    assert fields["bins"] == json.loads(json.dumps([*state.bins])) and fields["bins"][0][1]


def test_a_lazy_tuple_is_a_tuple_to_whoever_reads_it() -> None:
    lazy, plain = LazyTuple("[[1,2,3,4],[5,6,7,8]]", Segment._make), (Segment(1, 2, 3, 4), Segment(5, 6, 7, 8))
    assert lazy == plain and plain == lazy and lazy != plain[:1] and lazy != "ab"
    assert len(lazy) == 2 and lazy[-1] == plain[-1] and lazy[:1] == plain[:1] and [*lazy] == [*plain]
    assert repr(lazy) == repr(plain) and hash(lazy) == hash(plain)
    assert pickle.loads(pickle.dumps(lazy)) == copy.deepcopy(lazy) == plain
