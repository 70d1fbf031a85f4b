"""What is left out: samples by their absolute numbers, documents by theirs; held against the stream without a skip."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaresume.stream.batches import BatchSchedule
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import ConfigError, StreamExhausted
from megaresume.stream.left_out import NO_SKIPS, Skips, decide
from megaresume.stream.skips import (
    MOST_DOCUMENTS,
    MOST_WRITTEN,
    SkipConfig,
    absolute,
    common,
    left_out,
    minus,
    reached,
    trained,
    union,
)
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList, assert_exact_resume

StreamOf = Callable[..., Stream]
LENGTHS = {"a": [3, 9, 5, 2, 30, 7, 8, 1], "b": [4, 4, 11, 6, 2]}
DATA: dict[str, Any] = {
    "seed": 3,
    "seq_length": 16,
    "packing": {"mode": "best_fit", "open_bins": 3, "max_age": 6},
    "sources": {"a": {"weight": 2}, "b": {}},
}
PACKINGS: list[Any] = [DATA["packing"], "split", {"mode": "split", "align": 4}, "none"]


def _samples(stream: Stream, first: int, stop: int) -> list[list[tuple[int, ...]]]:
    plan = stream.plan(first, stop)
    return [
        [tuple(row) for row in plan.table[a:b].tolist()]
        for a, b in zip(plan.starts[:-1].tolist(), plan.starts[1:].tolist(), strict=True)
    ]


def _stream(data: Mapping[str, Any], state: StreamState | None = None, *skip: SkipConfig) -> Stream:
    config = StreamConfig.from_dict(data)
    stream = Stream(config, [LengthList(LENGTHS[s.name]) for s in config.sources], state=state)
    if skip:
        stream.skip(*skip)
    return stream


def _saved(stream: Stream, sample: int) -> StreamState:
    return StreamState.from_json(stream.state_at(sample).to_json())


def test_arithmetic_of_ranges() -> None:
    skipped = union([(8, 10), (2, 5)], [(10, 11)], [(4, 4)])
    assert skipped == ((2, 5), (8, 11))
    assert minus([(0, 9)], skipped) == ((0, 2), (5, 8)) and common([(0, 9)], skipped) == ((2, 5), (8, 9))
    kept = [n for n in range(20) if not any(a <= n < b for a, b in skipped)]
    for k, number in enumerate(kept):
        assert absolute(skipped, k) == number and trained(skipped, number) == k
        # Where a range is left out right there, the stream still stands before it.
        assert reached(skipped, k) == (kept[k - 1] + 1 if k else 0) == k + left_out(skipped, k)


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("ranges", [["5:9"], ["0:3", "7:8", "20:41"], ["6:9", "9:12"]], ids=str)
def test_the_samples_are_those_of_the_stream_without_the_range(packing: Any, ranges: list[str]) -> None:
    data = DATA | {"packing": packing}
    whole = _samples(_stream(data), 0, 120)
    skip = SkipConfig.from_dict({"samples": ranges})
    expected = [s for k, s in enumerate(whole) if not any(a <= k < b for a, b in skip.samples)]
    stream = _stream(data | {"skip": {"samples": ranges}})
    assert _samples(stream, 0, len(expected)) == expected
    # Backwards and in pieces too.
    assert _samples(stream, 3, 11) == expected[3:11]
    assert_exact_resume(lambda state: _stream(data | {"skip": {"samples": ranges}}, state), num_samples=60)


def test_what_is_left_out_is_counted(stream_of: StreamOf) -> None:
    data = DATA | {"skip": {"samples": ["10:20"]}}
    state, without = _stream(data).state_at(30), _stream(DATA).state_at(40)
    assert (state.reached, without.reached) == (40, 40)
    for name, cursor in state.sources.items():
        assert (cursor.position, cursor.tokens) == (without.sources[name].position, without.sources[name].tokens)
    given_up = _stream(DATA).plan(10, 20).table
    for k, cursor in enumerate(state.sources.values()):
        mine = given_up[given_up[:, 0] == k]
        assert cursor.left_out_tokens == mine[:, 4].sum() > 0
        assert cursor.left_out_documents == (mine[:, 3] == 0).sum() > 0
    assert state.bins == without.bins and state.digest != without.digest
    assert state.tokens == without.tokens - given_up[:, 4].sum()


def test_a_skip_given_at_a_resume_and_given_again() -> None:
    whole = _samples(_stream(DATA), 0, 100)
    before = _saved(_stream(DATA), 20)
    skip = SkipConfig.from_dict({"samples": ["25:30"]})
    stream = _stream(DATA, before, skip)
    assert stream.accepted == ("at sample 20: skip samples 25 to 29 (5 samples)",)
    assert _samples(stream, 20, 60) == whole[20:25] + whole[30:65]
    # Restarts on both sides of it, with the flag and without: nothing changes, nothing is recorded again.
    for sample in (20, 23, 25, 26, 40):
        state = _saved(stream, sample)
        for again in ((skip,), ()):
            resumed = _stream(DATA, state, *again)
            assert resumed.accepted == ()
            assert resumed.state_at(60) == stream.state_at(60)
    assert stream.state_at(60).overrides == ("at sample 20: skip samples 25 to 29 (5 samples)",)
    assert stream.state_at(25).reached == 25 and stream.state_at(26).reached == 31


def test_too_late_and_partly_too_late() -> None:
    whole = _samples(_stream(DATA), 0, 100)
    state = _saved(_stream(DATA), 20)
    late = _stream(DATA, state, SkipConfig(samples=((5, 12),)))
    assert late.accepted == ("at sample 20: skip samples 5 to 11 (0 samples): TOO LATE, all were trained already",)
    assert _samples(late, 20, 50) == whole[20:50]
    partly = _stream(DATA, state, SkipConfig(samples=((15, 24),)))
    (words,) = partly.accepted
    assert words.endswith("(4 samples): TOO LATE, 5 of them were trained already and stay trained")
    assert _samples(partly, 20, 50) == whole[24:54]
    assert _stream(DATA, _saved(partly, 30), SkipConfig(samples=((15, 24),))).accepted == ()
    # Said once; and the past is planned again as it was, from sample 0.
    last = _saved(partly, 50)
    again = Stream(
        StreamConfig.from_dict(last.config),
        [LengthList(LENGTHS[name]) for name in last.sources],
        past=last,
    )
    assert _samples(again, 0, 50) == whole[:20] + whole[24:54]
    assert again.state_at(50).digest == last.digest and again.state_at(20).digest == state.digest


def test_taken_back() -> None:
    """A range in data.yaml that has not come yet can be removed; one that was left out stays so."""
    whole = _samples(_stream(DATA), 0, 100)
    data = DATA | {"skip": {"samples": ["10:15", "40:50"]}}
    state = _saved(_stream(data), 20)
    stream = _stream(DATA, state)
    assert stream.accepted == ("at sample 20: do not skip samples 40 to 49 (10 samples)",)
    assert _samples(stream, 20, 60) == whole[25:65]
    later = _saved(stream, 30)
    assert later.skips.ranges == ((10, 15),)
    # Asked for once more: that is new.
    assert _stream(data, later).accepted == ("at sample 30: skip samples 40 to 49 (10 samples)",)
    # What a flag asked for stays, flag or no flag.
    flagged = _stream(DATA, None, SkipConfig(samples=((40, 50),)))
    assert _stream(DATA, _saved(flagged, 20)).state_at(60) == flagged.state_at(60)
    # So do steps that overlap what the data config takes back.
    stepped = _stream(data)
    stepped.schedule = BatchSchedule.constant(2)
    stepped.skip(SkipConfig(steps=((18, 30),)))  # samples 34 to 59
    assert _stream(DATA, _saved(stepped, 20)).state_at(60).skips.ranges == ((10, 15), (34, 60))


def test_steps_become_samples_once() -> None:
    schedule = BatchSchedule(((0, 4), (20, 8)))  # steps 1..5 of 4 samples, then 8
    skip = SkipConfig(steps=((4, 6), (8, 8)))
    stream = _stream(DATA)
    stream.schedule = schedule
    stream.skip(skip)
    assert stream.state_at(0).skips.ranges == ((12, 28), (36, 44))
    assert "skip steps 4 to 6 (samples 12 to 27; 16 samples)" in stream.accepted[0]
    state = _saved(stream, 20)
    # Another batch size: the steps are other samples now; those of the first sight stay.
    resumed = _stream(DATA, state)
    resumed.schedule = BatchSchedule.constant(2)
    resumed.skip(skip)
    assert resumed.accepted == () and resumed.state_at(80).digest == stream.state_at(80).digest
    # A new range counts steps as training shows them then: without what is left out already.
    newer = _stream(DATA, state)
    newer.schedule = BatchSchedule.constant(4)
    newer.skip(SkipConfig(steps=((11, 11),)))
    assert newer.state_at(20).skips.ranges == ((12, 28), (36, 44), (64, 68))
    with pytest.raises(ConfigError, match="batch sizes are not known"):
        _stream(DATA, None, skip)


def test_a_batch_size_that_changes_later_moves_no_skip() -> None:
    stream = _stream(DATA)
    stream.schedule = BatchSchedule.constant(4)
    stream.skip(SkipConfig(steps=((4, 6),)))
    before = stream.state_at(30)
    stream.schedule = BatchSchedule(((0, 4), (8, 8)))
    assert stream.state_at(30) == before


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_documents(packing: Any) -> None:
    """From the beginning: as if they were empty. Per-source order and everything else stays."""
    data = DATA | {"packing": packing}
    skipped = data | {"skip": {"documents": {"a": [1, 6], "b": {"ids": [2], "epochs": "1:3"}}}}
    rows = np.array([row for s in _samples(_stream(skipped), 0, 90) for row in s])
    a, b = rows[rows[:, 0] == 0], rows[rows[:, 0] == 1]
    assert not set(a[:, 2].tolist()) & {1, 6} and a[:, 1].max() > 3 * 8
    assert sorted(set((b[b[:, 2] == 2][:, 1] // 5).tolist()))[:2] == [0, 3]
    assert_exact_resume(lambda state: _stream(skipped, state), num_samples=60)


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_documents_from_a_resume_on(packing: Any) -> None:
    data = DATA | {"packing": packing}
    whole = _stream(data)
    skipped = data | {"skip": {"documents": {"a": [1, 4, 6]}}}
    seen_in_bins = 0
    for sample in range(3, 40):
        before = _saved(whole, sample)
        waiting = before.waiting
        stream = _stream(skipped, before)
        later = _saved(stream, 60)
        plan = stream.plan(sample, 60)
        a = plan.table[plan.table[:, 0] == 0]
        assert not set(a[:, 2].tolist()) & {1, 4, 6}, "a document that waited was trained all the same"
        dropped = later.sources["a"].left_out_tokens
        seen_in_bins += dropped > 0
        assert dropped <= sum(s.length for s in waiting)
        # The same from a state on the way, and from sample 0, with what was in force when.
        assert _stream(skipped, _saved(stream, sample + 7)).state_at(60) == later
        assert _stream(skipped, _saved(stream, sample)).state_at(60) == later
        again = Stream(
            StreamConfig.from_dict(later.config),
            [LengthList(LENGTHS[name]) for name in later.sources],
            past=later,
        )
        assert again.state_at(60).digest == later.digest and again.state_at(60).sources == later.sources
        assert again.digest_at(sample) == before.digest
        # Taken back: they come again, from there on.
        back = _stream(data, later)
        assert back.accepted == ("at sample 60: do not skip a:1,4,6 any more",)
        assert {1, 4, 6} <= set(back.plan(60, 110).table[:, 2][back.plan(60, 110).table[:, 0] == 0].tolist())
    assert seen_in_bins if packing != "none" else True


CHILD = """
import json, sys
from megaresume.stream.config import StreamConfig
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList
data, lengths, text = json.load(sys.stdin)
config, state = StreamConfig.from_dict(data), StreamState.from_json(text)
sources = [LengthList(lengths[s.name]) for s in config.sources]
past = Stream(StreamConfig.from_dict(state.config), sources, past=state)
print(past.digest_at(state.samples), Stream(config, sources, state=state).digest_at(state.samples + 30))
"""


@pytest.mark.process
def test_a_long_list_is_in_the_state(tmp_path: Path) -> None:
    """A process that never read the list, nor has its file any more, goes on and plans the past again."""
    lengths = LENGTHS | {"a": [(7 * i) % 23 for i in range(900)]}
    skipped = sorted({i * i % 900 for i in range(900)} | set(range(100, 400)))
    file = tmp_path / "ids.npy"
    np.save(file, np.array(skipped[::-1], np.int32))

    def stream(documents: object, state: StreamState | None = None) -> Stream:
        config = StreamConfig.from_dict(DATA | ({"skip": {"documents": {"a": documents}}} if documents else {}))
        return Stream(config, [LengthList(lengths[s.name]) for s in config.sources], state=state)

    first = stream({"file": str(file)})
    state = _saved(first, 12)
    assert [list(d.documents.numbers()) for d in state.skips.documents] == [skipped] and str(
        tmp_path
    ) not in state.to_json()
    assert len(skipped) > MOST_WRITTEN and len(json.dumps(state.skips.to_plain())) < 3 * len(skipped)
    later = _saved(stream([5], state), 20)  # and the list taken back
    assert [(d.at, d.until) for d in later.skips.documents] == [(0, 12), (12, None)]
    file.unlink()
    given = json.dumps([DATA | {"skip": {"documents": {"a": [5]}}}, lengths, later.to_json()])
    child = subprocess.run([sys.executable, "-c", CHILD], input=given, capture_output=True, text=True, check=True)
    whole = stream([5], state)
    assert child.stdout.split() == [whole.digest_at(20), whole.digest_at(50)]


@pytest.mark.parametrize(
    "change",
    [
        {"packed": "AAAA"},
        {"packed": "!"},
        {"packed": 3},
        {"count": 10**9},
        {"count": 299},
        {"digest": "0" * 16},
        {"packed": base64.b64encode(zlib.compress(bytes(10**7))).decode()},
    ],
)
def test_a_packed_list_that_is_damaged(change: dict[str, Any]) -> None:
    skip = SkipConfig.from_dict({"documents": {"a": list(range(0, 900, 3))}})
    skips, _ = decide(NO_SKIPS, 0, then=SkipConfig(), now=skip)
    plain = skips.to_plain()
    assert Skips.from_plain(plain) == skips and Skips.from_plain(plain).documents[0].documents.ids[-1] == 897
    plain["documents"][0][3] |= change
    with pytest.raises((ValueError, TypeError, ConfigError)):
        Skips.from_plain(plain)


def test_a_list_that_is_too_long_for_a_state(tmp_path: Path) -> None:
    file = tmp_path / "ids.npy"
    np.save(file, np.arange(MOST_DOCUMENTS + 1))
    with pytest.raises(ConfigError, match="more documents than a data state can hold"):
        SkipConfig.from_dict({"documents": {"a": {"file": str(file)}}})


def _all_but(*kept: int) -> list[int]:
    return [i for i in range(8) if i not in kept]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kept", [[], [3]])
def test_epochs_in_which_everything_is_skipped_are_passed_over(packing: Any, kept: list[int]) -> None:
    """Also if a document is left that is empty. Five epochs of nothing, then the source goes on where it would."""
    lengths = LENGTHS | {"a": [3, 9, 5, 0, 30, 7, 8, 1]}
    data = DATA | {"packing": packing}
    config = StreamConfig.from_dict(
        data
        | {"skip": {"documents": {"a": [{"ids": _all_but(*kept), "epochs": "2:7"}, {"ids": [4], "epochs": "7:9"}]}}}
    )
    sources = [LengthList(lengths[s.name]) for s in config.sources]
    assert_exact_resume(lambda state: Stream(config, sources, state=state), num_samples=40)
    drawn, epochs = _drawn_of_a(Stream(config, sources))
    assert list(dict.fromkeys(epochs.tolist()))[:4] == [0, 1, 7, 8] and 9 in epochs
    assert set(drawn[epochs == 7][:, 2].tolist()) == set(range(8)) - {3, 4}
    whole, epochs_of_whole = _drawn_of_a(Stream(StreamConfig.from_dict(data), sources))
    assert drawn[epochs < 2].tolist() == whole[epochs_of_whole < 2].tolist()


def _drawn_of_a(stream: Stream) -> tuple[Any, Any]:
    """The first segments of documents of source a, in the order in which they were drawn, and their epochs."""
    plan = stream.plan(0, 700)
    rows = np.flatnonzero((plan.table[:, 0] == 0) & (plan.table[:, 3] == 0))
    rows = rows[np.argsort(plan.table[rows, 1])]
    return plan.table[rows], plan.epochs()[rows]


@pytest.mark.parametrize("on_exhausted", ["drop", "stop"])
def test_a_source_that_ends_in_skipped_epochs_ends_as_configured(on_exhausted: str) -> None:
    entry = {"weight": 2, "max_epochs": 6, "on_exhausted": on_exhausted}
    sources = {"sources": {"a": entry, "b": {}}, "skip": {"documents": {"a": {"ids": list(range(8)), "epochs": "2:9"}}}}
    stream = _stream(DATA | sources)
    shorter = _stream(DATA | {"sources": {"a": entry | {"max_epochs": 2}, "b": {}}})
    if on_exhausted == "drop":
        assert (stream.plan(0, 90).table == shorter.plan(0, 90).table).all()
        assert stream.state_at(90).sources["a"].exhausted
    else:
        ends = []
        for one in (stream, shorter):
            with pytest.raises(StreamExhausted) as error:
                one.plan(0, 500)
            ends.append(str(error.value.headline))
        assert ends[0] == ends[1]


@pytest.mark.parametrize("kept", [[], [3]])
def test_a_source_of_which_nothing_would_be_left_is_refused_at_once(kept: list[int]) -> None:
    lengths = LENGTHS | {"a": [3, 9, 5, 0, 30, 7, 8, 1]}

    def stream(data: Any, state: StreamState | None = None, on_change: Any = "stage") -> Stream:
        config = StreamConfig.from_dict(data)
        return Stream(config, [LengthList(lengths[s.name]) for s in config.sources], state=state, on_change=on_change)

    gone = {"skip": {"documents": {"a": _all_but(*kept)}}}
    state = _saved(stream(DATA | {"packing": "none"}), 20)
    data = DATA | {"packing": "none"}
    later = {"stages": [{"from_samples": 40, "weights": {"a": 1, "b": 1}}]}
    none_yet = {"sources": {"a": {"weight": 0}, "b": {}}}
    ended = {"sources": {"a": {"max_epochs": 3}, "b": {}}}
    for bad, at in (
        (data | gone, None),
        (data | gone, state),
        (data | none_yet | later | gone, None),
        (
            data
            | {"skip": {"documents": {"a": [{"ids": _all_but(*kept), "epochs": "0:5"}, {"ids": _all_but(*kept)}]}}},
            None,
        ),
        (data | {"skip": {"documents": {"a": [{"ids": [0, 1, 2, 3]}, {"ids": _all_but(0, 1, 2, *kept)}]}}}, None),
        (data | ended | {"skip": {"documents": {"a": {"ids": _all_but(*kept), "epochs": "0:3"}}}}, None),
    ):
        with pytest.raises(ConfigError, match="nothing of source 'a' is left to train on") as error:
            stream(bad, at)
        assert "weight 0" in str(error.value.action)
    # Not drawn any more from the same moment on.
    assert stream(data | none_yet | gone, state).plan(20, 60).table[:, 0].tolist() == [1] * 40
    assert stream(data | ended | {"skip": {"documents": {"a": {"ids": _all_but(*kept), "epochs": "0:2"}}}}).plan(0, 60)
    with pytest.raises(ConfigError, match=r"bad range in skip.documents.a.epochs"):
        stream(data | {"skip": {"documents": {"a": {"ids": [1], "epochs": "3:99999999999999"}}}})


@pytest.mark.parametrize(
    ("skip", "error"),
    [
        ({"samples": ["9:5"]}, "backward"),
        ({"samples": [5, 9]}, "bad range"),
        ({"samples": ["5"]}, "bad range"),
        ({"samples": ["-5:9"]}, "bad range"),
        ({"samples": "5:5"}, "bad range"),
        ({"smaples": []}, "bad value of skip"),
        ([3], "bad value of skip"),
        ({"documents": [3]}, "bad value of skip.documents"),
        ({"documents": {"c": [3]}}, "unknown source"),
        ({"documents": {"a": [-3]}}, "bad value of skip.documents.a"),
        ({"documents": {"a": []}}, "bad value of skip.documents.a"),
        ({"documents": {"a": ["3"]}}, "bad value of skip.documents.a"),
        ({"documents": {"a": {"file": "/no/such/ids.npy"}}}, "cannot be read"),
        ({"documents": {"a": {"ids": [3], "epochs": "2:1"}}}, "bad range"),
        ({"documents": {"a": [8]}}, "has no document 8"),
    ],
)
def test_bad_input(skip: Any, error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        _stream(DATA | {"skip": skip})
    assert error in str(raised.value)


def test_beyond_the_end_of_the_run() -> None:
    stream = _stream(DATA | {"skip": {"samples": ["10:20"]}})
    stream.skip(SkipConfig(samples=((105, 110),)), end=100)  # sample 100 is 110 counted with what is left out
    with pytest.raises(ConfigError, match="beyond the end") as raised:
        stream.skip(SkipConfig(samples=((115, 140),)), end=100)
    assert "ends with sample 99 (114 counted with what is left out)" in str(raised.value.expected)
    assert stream.state_at(3).skips.ranges == ((10, 20), (105, 110))  # as it was
    with pytest.raises(ConfigError, match="leaves out more than the run trains"):
        stream.skip(SkipConfig(samples=((30, 1 << 61),)), end=100)


def test_where_the_stream_ends_in_a_skip() -> None:
    data = DATA | {"sources": {"a": {"max_epochs": 2}, "b": {"max_epochs": 2}}}
    whole = _stream(data)
    num = next(n for n in range(1, 100) if not _has(whole, n))
    stream = _stream(data | {"skip": {"samples": [f"{num - 3}:{num + 50}"]}})
    last = stream.state_at(num - 3)
    for ask in (lambda: stream.plan(0, num - 2), lambda: stream.state_at(num - 2)):
        with pytest.raises(StreamExhausted, match="the stream has ended"):
            ask()
    assert stream.state_at(num - 3) == last and _samples(stream, 0, num - 3) == _samples(whole, 0, num - 3)


def _has(stream: Stream, n: int) -> bool:
    try:
        stream.plan(n - 1, n)
    except StreamExhausted:
        return False
    return True


def test_a_stage_begins_by_what_is_trained() -> None:
    """A skip before it moves its data up, and moves it not by a step."""
    data = DATA | {"stages": [{"from_samples": 30, "weights": {"a": 0, "b": 1}}]}
    stream = _stream(data | {"skip": {"samples": ["10:25"]}})
    assert [s.first for s in stream.state_at(40).stages] == [0, 30]
    assert stream.state_at(40).reached == 55


def test_nothing_skipped_is_nothing_said() -> None:
    state = _stream(DATA).state_at(10)
    assert state.skips == NO_SKIPS and not state.skips and "skip" not in state.config


def test_a_copy_for_a_worker_skips_too(stream_of: StreamOf) -> None:
    import pickle

    stream = _stream(DATA)
    stream.schedule = BatchSchedule.constant(4)
    stream.skip(SkipConfig(samples=((3, 9),), steps=((5, 6),)))
    copy = pickle.loads(pickle.dumps(stream))
    assert copy.state_at(40) == stream.state_at(40)
