"""What planners and texts of states keep from one question to the next never shows in an answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from megaresume.stream import planner, state_text
from megaresume.stream.skips import SkipConfig
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream

StreamOf = Callable[..., Stream]
SEQ_LENGTH = 64


def _data(num_sources: int, seed: int, **more: Any) -> tuple[dict[str, Any], dict[str, list[int]]]:
    rng = random.Random(seed)
    lengths = {f"s{k}": [rng.randint(1, 150) for _ in range(rng.randint(2, 9))] for k in range(num_sources)}
    sources: dict[str, Any] = {
        name: {"weight": rng.choice([0, 1, 1, 2, 9]) if k else 1} for k, name in enumerate(lengths)
    }
    return {"seed": seed, "seq_length": SEQ_LENGTH, "packing": "best_fit", "sources": sources} | more, lengths


@pytest.mark.parametrize("top_up", [1, 16])
@pytest.mark.parametrize("far", [1, 3])
def test_the_order_does_not_depend_on_how_far_is_looked_ahead(
    stream_of: StreamOf, monkeypatch: pytest.MonkeyPatch, far: int, top_up: int
) -> None:
    """Sources end one after the other; a state is taken before the front, where a planner looks again."""
    data, lengths = _data(30, 5)
    for name in ("s3", "s7", "s20"):
        data["sources"][name] |= {"weight": 9, "max_epochs": 1, "on_exhausted": "drop"}
    usual = stream_of(data, lengths)
    expected = usual.plan(0, 150)
    assert sum(cursor.exhausted for cursor in usual.state_at(150).sources.values()) == 3
    for name, value in {"LOOK_AHEAD_HIGH": far, "LOOK_AGAIN": far, "TOP_UP": top_up}.items():
        monkeypatch.setattr(planner, name, value)
    stream = stream_of(data, lengths)
    assert stream.plan(0, 150).table.tolist() == expected.table.tolist()
    for sample in (149, 60, 61, 150, 9):
        assert stream.state_at(sample).to_json() == usual.state_at(sample).to_json()


def test_streams_that_are_asked_in_turns_say_what_each_would_say_alone(
    stream_of: StreamOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equal names, of equal configs with other skips, large and small, in any order of samples."""
    monkeypatch.setattr(state_text, "MOST_KEPT", 20)  # so that texts are dropped and made again
    made: list[Callable[[], Stream]] = []
    for num_sources, seed in ((12, 1), (12, 2), (150, 1)):
        data, lengths = _data(num_sources, seed)
        stage = {"name": "late", "from_samples": 9, "seq_length": 96}
        made += [partial(stream_of, config, lengths) for config in (data, data | {"stages": [stage]})]
        made.append(partial(_with_skip, stream_of, data, lengths))
    streams = [make() for make in made]
    rng = random.Random(3)
    asked = [(k, sample) for k in range(len(made)) for sample in rng.sample(range(25), 3)] * 2
    rng.shuffle(asked)
    texts: dict[tuple[int, int], str] = {}
    for k, sample in asked:
        text = _text(streams[k], sample)
        assert texts.setdefault((k, sample), text) == text
        assert StreamState.from_json(text).to_json() == text
    for (k, sample), text in [*texts.items()][::4]:
        state_text._kept.clear()
        assert _text(made[k](), sample) == text


def test_a_text_is_not_taken_for_that_of_an_object_which_is_gone(stream_of: StreamOf) -> None:
    """Another object may get the id of one that is gone."""
    state = stream_of(*_data(2, 1)).state_at(5)
    for seed in range(200):
        text = state.replace(config={**state.config, "seed": seed}).to_json()
        assert StreamState.from_json(text).config["seed"] == seed


def _with_skip(stream_of: StreamOf, data: dict[str, Any], lengths: dict[str, list[int]]) -> Stream:
    stream = stream_of(data, lengths)
    stream.skip(SkipConfig(samples=((3, 5),)))
    return stream


def _text(stream: Stream, sample: int) -> str:
    faults = [(at, "s0", 1, 0, "mask", "why") for at in range(0, sample, 8)]
    return stream.state_at(
        sample, batches=[(0, 1 + sample % 3)], overrides=("o",) * (sample % 2), faults=faults
    ).to_json()


@pytest.mark.parametrize("num_sources", [3, 12, 70])
@pytest.mark.parametrize("turns", [2**20, 2**53])
def test_a_long_run_goes_on_as_a_short_one(stream_of: StreamOf, num_sources: int, turns: int) -> None:
    """A state after ``turns`` more rounds, in each of which every source has had its share, is followed by the same."""
    data, lengths = _data(num_sources, 4, packing="none")
    stream = stream_of(data, lengths)
    weights = {source.name: source.weight for source in stream.config.sources}
    state = stream.state_at(20)
    sources = {
        name: its._replace(
            tokens=its.tokens + turns * weights[name], drawn_in_stage=its.drawn_in_stage + turns * weights[name]
        )
        for name, its in state.sources.items()
    }
    later = state.replace(sources=sources, tokens=state.tokens + turns * sum(weights.values()))
    resumed = stream_of(data, lengths, StreamState.from_json(later.to_json()))
    assert resumed.plan(20, 300).table.tolist() == stream.plan(20, 300).table.tolist()
    again = stream_of(data, lengths, StreamState.from_json(resumed.state_at(99).to_json()))
    assert again.plan(99, 300).table.tolist() == stream.plan(99, 300).table.tolist()
