"""Through the whole pipeline: every document of every source exactly once an epoch, with all its tokens."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.stream.config import StreamConfig
from megaresume.stream.data_yaml import MODES, PackingMode
from megaresume.stream.errors import StreamExhausted
from megaresume.stream.planner import PlannedSegment, Planner
from megaresume.stream.stages import Course
from megaresume.testing import LengthList

Configs = Callable[..., st.SearchStrategy[tuple[dict[str, Any], dict[str, list[int]]]]]
Samples = list[list[PlannedSegment]]


def _samples(data: dict[str, Any], lengths: dict[str, list[int]], num: int) -> Samples:
    config = StreamConfig.from_dict(data)
    return list(Planner(Course.of(config), [LengthList(lengths[s.name]) for s in config.sources]).advance(num))


def _by_document(samples: Samples) -> dict[tuple[int, int, int], list[PlannedSegment]]:
    """Segments by (source, epoch, document), in the order of the stream."""
    documents = defaultdict(list)
    for sample in samples:
        for s in sample:
            documents[s.source, s.epoch, s.document].append(s)
    return documents


def _assert_whole(segments: list[PlannedSegment], length: int) -> None:
    """All tokens once, in whatever order its pieces came."""
    offset = 0
    for s in sorted(segments, key=lambda s: s.offset):
        assert s.offset == offset and s.length > 0
        offset += s.length
    assert offset == length


@settings(max_examples=60)
@given(drawn=st.data())
@pytest.mark.parametrize("mode", MODES)
def test_every_document_once_an_epoch(mode: PackingMode, configs: Configs, drawn: st.DataObject) -> None:
    data, lengths = drawn.draw(configs(modes=[mode]))
    for source in data["sources"].values():
        source |= {"max_epochs": source.get("max_epochs", 2), "on_exhausted": "drop"}
    samples = _samples(data, lengths, 10_000)
    documents = _by_document(samples)
    expected = {
        (i, epoch, document)
        for i, (name, source) in enumerate(data["sources"].items())
        if source["weight"] > 0
        for epoch in range(source["max_epochs"])
        for document, length in enumerate(lengths[name])
        if length
    }
    assert set(documents) == expected
    align, seq_length = data["packing"]["align"], data["seq_length"]
    for (i, _, document), segments in documents.items():
        length = lengths[f"s{i}"][document]
        _assert_whole(segments, length)
        if not MODES[mode].cuts:  # cut only when longer than a sample, and then into as few pieces as possible
            pieces = [s.length for s in sorted(segments, key=lambda s: s.offset)]
            assert pieces[:-1] == [seq_length] * ((length - 1) // seq_length)
    for k, sample in enumerate(samples):
        used = sum(-(-s.length // align) * align for s in sample)
        assert sample and used <= seq_length
        if MODES[mode].cuts and k < len(samples) - 1:
            assert used == seq_length
        if MODES[mode].is_one_document:
            assert len(sample) == 1


@pytest.mark.parametrize("mode", MODES)
def test_epochs_of_an_endless_stream(mode: PackingMode) -> None:
    """Nothing of epoch e + 2 before all of epoch e was seen; bins hold few documents back, `split` the ends of 256."""
    rng = random.Random(8)
    lengths = {"a": [rng.randint(0, 90) for _ in range(500)], "b": [rng.randint(1, 300) for _ in range(30)]}
    bins = MODES[mode].bins
    packing = {"mode": mode} if bins is None else {"mode": mode, bins: 8}  # fewer than an epoch of the smaller source
    data = {"seq_length": 100, "packing": packing, "sources": {"a": {"weight": 2}, "b": {"weight": 1}}}
    documents = _by_document(_samples(data, lengths, 3000))
    for i, name in enumerate(lengths):
        last = max(epoch for source, epoch, _ in documents if source == i)
        assert last >= 3
        order = [epoch for source, epoch, _ in documents if source == i]
        for epoch in range(last - (4 if MODES[mode].cuts else 1)):
            whole = {d for d, length in enumerate(lengths[name]) if length}
            assert {d for s, e, d in documents if (s, e) == (i, epoch)} == whole
            for document in whole:
                _assert_whole(documents[i, epoch, document], lengths[name][document])
            if epoch + 2 <= last and not MODES[mode].cuts:
                assert len(order) - order[::-1].index(epoch) - 1 < order.index(epoch + 2)


def test_first_and_last_sample_of_an_epoch(stream_of: Callable[..., Any]) -> None:
    n = 37
    stream = stream_of({"seq_length": 8, "packing": "none", "sources": {"a": {}}}, {"a": [3] * n})
    (last,), (first,) = stream.plan(n - 1, n + 1)
    assert (last.epoch, first.epoch) == (0, 1)
    before, at, after = (stream.state_at(k).sources["a"] for k in (n - 1, n, n + 1))
    assert [(c.position, c.epoch) for c in (before, at, after)] == [(n - 1, 0), (n, 1), (n + 1, 1)]
    assert sorted(s.document for (s,) in stream.plan(0, n)) == list(range(n))
    assert sorted(s.document for (s,) in stream.plan(n, 2 * n)) == list(range(n))


@pytest.mark.parametrize(("policy", "expected"), [("drop", "abababab" + "aaaaaa"), ("stop", "abababab")])
def test_what_happens_when_a_source_ends(stream_of: Callable[..., Any], policy: str, expected: str) -> None:
    data = {
        "seq_length": 4,
        "packing": "none",
        "blend": {"unit": "documents"},
        "sources": {"a": {"max_epochs": 1, "on_exhausted": "drop"}, "b": {"max_epochs": 2, "on_exhausted": policy}},
    }
    stream = stream_of(data, {"a": [4] * 10, "b": [4] * 2})
    assert "".join("ab"[s.source] for (s,) in stream.plan(0, len(expected))) == expected
    with pytest.raises(StreamExhausted, match="the stream has ended") as error:
        stream.plan(0, len(expected) + 1)
    assert f"the stream has {len(expected)} samples" in str(error.value.found)
    assert "b (2 epochs" in str(error.value.cause)


def test_repeat_goes_on_and_says_so_once(stream_of: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    data = {"seq_length": 4, "packing": "none", "sources": {"a": {"max_epochs": 2, "on_exhausted": "repeat"}}}
    stream = stream_of(data, {"a": [1] * 1000})
    assert stream.plan(4999, 5000).segments(4999)[0].epoch == 4
    for sample in range(2200, 2900, 100):  # in the epoch after the last: a state is no reason to say it again
        stream.state_at(sample)
    assert [r.getMessage() for r in caplog.records] == [
        "source 'a' has been seen for max_epochs 2 and is repeated (on_exhausted: repeat)"
    ]
    assert not stream.state_at(3000).sources["a"].exhausted
