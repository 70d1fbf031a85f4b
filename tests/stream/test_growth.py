"""A corpus that grew in the middle of a run: every token of old and new documents once an epoch, read from raw files.

Every token of a corpus has a value of its own, so that whoever reads the batches can count. A source ends after two
epochs: then every old token was trained twice, and a new one as often as it should have been.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.corpora import write_corpus
from megaresume.batches.loader import StreamLoader
from megaresume.data.layout import bin_path
from megaresume.data.split import IndexedSource
from megaresume.runs.trace.points import RecordedPoint, check_points
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import ConfigError, StateError, StreamExhausted
from megaresume.stream.fields import comparable
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList, assert_exact_resume

SEQ, BATCH = 32, 6
SIZES = random.Random(3)
LENGTHS = [SIZES.choice([1, 3, 9, 20, 31, 32, 50, 70, 130]) for _ in range(90)]


def _corpus(directory: Path, documents: int) -> IndexedSource:
    """The first documents of one that goes on for ever; token k of it has the value k + 1."""
    directory.mkdir(exist_ok=True)
    lengths = np.array(LENGTHS[:documents], np.int32)
    prefix = write_corpus(directory / "web", lengths, sparse=True)
    np.arange(1, lengths.sum() + 1, dtype="<i4").tofile(bin_path(prefix))
    return IndexedSource(prefix)


def _config(packing: Any = "split", append: str | None = "now", **more: Any) -> StreamConfig:
    source = {"max_epochs": 2} | ({"append": append} if append else {}) | more
    return StreamConfig.from_dict({"seed": 5, "seq_length": SEQ, "packing": packing, "sources": {"web": source}})


def _train(stream: Stream, steps: int, dp: int, counts: Counter[int]) -> StreamState:
    """So many steps on so many ranks; what they got is counted."""
    schedule = BatchSchedule.constant(BATCH)
    for rank in range(dp):
        loader = StreamLoader(stream, schedule, micro_batch_size=1, dp_rank=rank, dp_size=dp)
        batches = iter(loader)
        for _ in range(steps * BATCH // dp):
            counts.update(next(batches)["tokens"].flatten().tolist())
    return StreamState.from_json(stream.state_at(stream.start + steps * BATCH).to_json())


def _to_the_end(stream: Stream, directory: Path, counts: Counter[int]) -> None:
    """The rest, read from the raw file by the numbers in the plan."""
    raw = np.fromfile(directory / "web.bin", "<i4")
    starts = np.cumsum([0, *LENGTHS])
    sample = stream.start
    while True:
        try:
            plan = stream.plan(sample, sample + 1)
        except StreamExhausted:
            return
        for _, _, document, offset, length in plan.table.tolist():
            counts.update(raw[starts[document] + offset :][:length].tolist())
        sample += 1


def _expected(*parts: tuple[int, int]) -> Counter[int]:
    """(documents, how often): how often each token comes."""
    counts: Counter[int] = Counter()
    first = 0
    for documents, times in parts:
        begin, end = sum(LENGTHS[:first]), sum(LENGTHS[:documents])
        counts.update(dict.fromkeys(range(begin + 1, end + 1), times))
        first = documents
    return counts


@pytest.mark.parametrize("packing", ["split", {"mode": "best_fit", "open_bins": 3}, "none", "knapsack"])
@pytest.mark.parametrize("append", ["now", "next_epoch"])
def test_every_token_once_an_epoch(tmp_path: Path, packing: Any, append: str) -> None:
    counts: Counter[int] = Counter()
    state = _train(Stream(_config(packing), [_corpus(tmp_path, 40)]), 3, 2, counts)
    assert state.sources["web"].epoch == 0
    stream = Stream(_config(packing, append), [_corpus(tmp_path, 60)], state=state)
    (said,) = stream.accepted
    assert said.startswith("at sample 18: source 'web' grew from 40 to 60 documents")
    state = _train(stream, 2, 3, counts)
    assert [(s.first, s.name) for s in state.stages] == [(0, "start"), (18, "stage 2")]
    # From then on it is the corpus of the run, with and without the declaration.
    again = Stream(_config(packing, None), [_corpus(tmp_path, 60)], state=state)
    assert again.accepted == () and again.state_at(30) == stream.state_at(30).replace(batches=())
    _to_the_end(again, tmp_path, counts)
    del counts[0]  # padding
    assert counts == _expected((40, 2), (60, 2 if append == "now" else 1))


@pytest.mark.parametrize("packing", ["split", {"mode": "best_fit", "open_bins": 3}])
def test_again_and_again(tmp_path: Path, packing: Any) -> None:
    """Twice into one epoch, then for the next one, with another sequence length and a skip on the way."""
    counts: Counter[int] = Counter()
    state = _train(Stream(_config(packing), [_corpus(tmp_path, 40)]), 2, 2, counts)
    state = _train(Stream(_config(packing), [_corpus(tmp_path, 50)], state=state), 2, 1, counts)
    state = _train(Stream(_config(packing), [_corpus(tmp_path, 60)], state=state), 2, 3, counts)
    assert [era.rest > 0 for era in state.sources["web"].eras] == [False, True, True, False]
    later = StreamConfig.from_dict(
        {"seed": 5, "seq_length": 16, "packing": packing, "sources": {"web": {"max_epochs": 2, "append": "next_epoch"}}}
    )
    stream = Stream(later, [_corpus(tmp_path, 90)], state=state, on_change="stage")
    assert "seq_length 32 -> 16" in stream.accepted[0] and "to 90 documents" in stream.accepted[1]
    state = _train(stream, 2, 2, counts)
    assert state.sources["web"].epoch == 0 and [era.piece for era in state.sources["web"].eras] == [32, 32, 32, 16]
    _to_the_end(Stream(later, [_corpus(tmp_path, 90)], state=state), tmp_path, counts)
    del counts[0]
    assert counts == _expected((60, 2), (90, 1))


def test_long_documents_come_into_an_epoch_of_short_pieces() -> None:
    """Its later pieces are more than any whole epoch has: the longer samples of the next one cut nothing."""

    def stream(documents: int, seq_length: int, state: StreamState | None) -> Stream:
        mapping = {"seed": 5, "seq_length": seq_length, "sources": {"web": {"append": "now", "max_epochs": 2}}}
        source = LengthList([3] * 8 + [40] * (documents - 8))
        return Stream(StreamConfig.from_dict(mapping), [source], state=state, on_change="stage")

    state = stream(8, 4, None).state_at(2)
    state = stream(8, 64, state).state_at(2)
    state = stream(12, 64, state).state_at(2)
    assert_exact_resume(lambda later: stream(12, 64, later or state), num_samples=4)


def test_what_was_to_come_of_the_epoch_comes_in_its_order(tmp_path: Path) -> None:
    """`next_epoch` changes nothing before the epoch is over; `now` mixes the rest with what is new."""
    before = Stream(_config("none"), [_corpus(tmp_path, 40)])
    state = before.state_at(10)
    pieces = state.sources["web"].size
    rest = [row[1:] for row in before.plan(10, pieces).table.tolist()]
    later = Stream(_config("none", "next_epoch"), [_corpus(tmp_path, 60)], state=state)
    assert [row[1:] for row in later.plan(10, pieces).table.tolist()] == rest
    now = Stream(_config("none", "now"), [_corpus(tmp_path, 60)], state=state)
    end = now.state_at(11).sources["web"].size
    mixed = [row[2:] for row in now.plan(10, end).table.tolist()]
    new = [row for row in mixed if row[0] >= 40]
    assert sorted(row for row in mixed if row[0] < 40) == sorted(row[1:] for row in rest)
    places = [k for k, row in enumerate(mixed) if row[0] >= 40]
    assert len(new) == end - pieces and min(places) < len(mixed) // 5 and max(places) > len(mixed) * 4 // 5
    assert now.plan(10, end).epochs().tolist() == [0] * (end - 10)


def test_it_resumes_exactly(tmp_path: Path) -> None:
    sources = [_corpus(tmp_path / str(n), n) for n in (40, 60)]
    state = Stream(_config(), sources[:1]).state_at(10)
    assert_exact_resume(lambda s: Stream(_config(), sources[1:], state=s or state), 120)


@pytest.mark.parametrize("shuffle", [None, {"block": 7, "window": 2}])
def test_a_run_that_grew_is_proved_from_its_beginning(tmp_path: Path, shuffle: Any) -> None:
    states, state = [], None
    for documents, until in ((30, 14), (45, 25), (60, 70)):
        config = _config("best_fit", "now" if documents == 45 else "next_epoch", shuffle=shuffle)
        stream = Stream(config, [_corpus(tmp_path, documents)], state=state)
        states += [stream.state_at(until - 5), stream.state_at(until)]
        state = states[-1]
    assert state is not None
    points = [
        RecordedPoint(
            origin=str(s.samples),
            sample=s.samples,
            digest=s.digest,
            position=comparable({name: getattr(s, name) for name in StreamState.__slots__}),
        )
        for s in states
    ]
    past = Stream(StreamConfig.from_dict(state.config), [_corpus(tmp_path, 60)], past=state)
    checked = list(check_points(past, points))
    assert [c.fields for c in checked] == [()] * 6 and all(c.holds for c in checked)


def test_not_declared(tmp_path: Path) -> None:
    state = Stream(_config(), [_corpus(tmp_path, 40)]).state_at(10)
    with pytest.raises(StateError, match="is not the corpus") as error:
        Stream(_config(append=None), [_corpus(tmp_path, 60)], state=state, on_change="stage")
    assert "has grown by 20 documents" in str(error.value.cause)
    assert "append: next_epoch (or now) for 'web'" in str(error.value.action)
    with pytest.raises(ConfigError, match=r"sources\.web\.append"):
        _config(append="later")


def test_shrunk(tmp_path: Path) -> None:
    state = Stream(_config(), [_corpus(tmp_path, 40)]).state_at(10)
    with pytest.raises(StateError, match="is not the corpus") as error:
        Stream(_config(), [_corpus(tmp_path, 39)], state=state)
    assert "has lost 1 documents" in str(error.value.cause)


def test_another_beginning(tmp_path: Path) -> None:
    """New documents in front; and old ones of the same lengths with other tokens."""
    state = Stream(_config(), [_corpus(tmp_path, 40)]).state_at(10)
    lengths = np.array([5, *LENGTHS[:40]], np.int32)
    shifted = write_corpus(tmp_path / "shifted", lengths, sparse=True)
    with pytest.raises(StateError, match="does not begin with the corpus") as error:
        Stream(_config(), [IndexedSource(shifted)], state=state)
    assert "web.lengths" in str(error.value.found) and "of the first 40 of 41" in str(error.value.found)
    source = _corpus(tmp_path, 60)
    tokens = np.fromfile(bin_path(source.prefix), "<i4")
    tokens[sum(LENGTHS[:7])] += 1
    tokens.tofile(bin_path(source.prefix))
    with pytest.raises(StateError, match="does not begin with the corpus") as error:
        Stream(_config(), [IndexedSource(source.prefix)], state=state)
    assert str(error.value.found).count("web.") == 1 and "web.contents" in str(error.value.found)


def test_a_part_of_a_split(tmp_path: Path) -> None:
    from megaresume.data.split import split_part

    part = split_part(_corpus(tmp_path, 40), "90,10", "train")
    with pytest.raises(ConfigError, match=r"cannot grow: it is a part of a split(.|\n)*append: now"):
        Stream(_config(), [part])
    state = Stream(_config(append=None), [part]).state_at(10)
    grown = split_part(_corpus(tmp_path, 60), "90,10", "train")
    with pytest.raises(StateError, match=r"is not the corpus(.|\n)*grown by 18 documents"):
        Stream(_config(append=None), [grown], state=state)


def test_renamed_and_grown_with_documents_to_skip() -> None:
    def stream(sources: dict[str, Any], lengths: list[int], state: StreamState | None = None, **more: Any) -> Stream:
        config = StreamConfig.from_dict({"seed": 1, "seq_length": 32, "packing": "none", "sources": sources} | more)
        return Stream(config, [LengthList(lengths) for _ in sources], state=state)

    state = stream({"web": {}}, LENGTHS[:30]).state_at(12)
    renamed = {"crawl": {"was": "web", "append": "now"}}
    skip = {"documents": {"crawl": [35, 3]}}
    grown = stream(renamed, LENGTHS[:50], state, skip=skip)
    assert len(grown.accepted) == 3
    end = grown.state_at(12).sources["web"].size
    plan = grown.plan(12, end - 20)
    assert not {3, 35} & set(plan.table[:, 2].tolist()) and {*range(40, 50)} <= set(plan.table[:, 2].tolist())
    assert stream(renamed, LENGTHS[:50], grown.state_at(20), skip=skip).state_at(60) == grown.state_at(60)
