"""What says the same is the same: a restart with the config of before, and sources written in another order."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megaresume.stream.config import OnChange, StreamConfig
from megaresume.stream.data_yaml import MODES
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList

LENGTHS = [[5, 9, 3, 30, 7, 2, 16, 16], [4, 12, 6, 1, 1, 40], [16, 16, 16], [1, 2, 3, 4, 5, 6, 7, 8]]
WEIGHT = st.one_of(
    st.floats(1e-6, 1e3).map(lambda x: float(f"{x:.16g}")),
    st.integers(10**9, 9 * 10**9),
    st.sampled_from([1, 1, 2]),
)


def _stream(data: dict[str, Any], state: StreamState | None = None, on_change: OnChange = "refuse") -> Stream:
    config = StreamConfig.from_dict(data)
    sources = [LengthList(LENGTHS[s.options["lengths"]]) for s in config.sources]
    return Stream(config, sources, state=state, on_change=on_change)


def _state(stream: Stream, sample: int) -> StreamState:
    return StreamState.from_json(stream.state_at(sample).to_json())


def _data(weights: list[Any], packing: Any = "best_fit", stages: list[Any] | None = None) -> dict[str, Any]:
    names = ["s2", "s10", "s1", "s3"][: len(weights)]
    sources = {n: {"weight": w, "lengths": k} for k, (n, w) in enumerate(zip(names, weights, strict=True))}
    data = {"seed": 3, "seq_length": 16, "packing": packing, "sources": sources}
    return data | (
        {"stages": [{"from_samples": 20, "weights": dict(zip(names, stages, strict=True))}]} if stages else {}
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(WEIGHT, min_size=2, max_size=4), st.data())
@pytest.mark.parametrize("on_change", ["refuse", "stage"])
def test_an_unchanged_restart_is_no_change(on_change: OnChange, weights: list[Any], data: st.DataObject) -> None:
    later = data.draw(st.one_of(st.none(), st.lists(WEIGHT, min_size=len(weights), max_size=len(weights))))
    config = _data(weights, stages=later)
    whole = _stream(config)
    state = None
    for sample in (10, 20, 30):  # before, at and after the declared stage
        state = _state(_stream(config, state, on_change), sample)
        again = _stream(config, state, on_change)
        assert again.accepted == () and again.state_at(sample).stages == state.stages == whole.state_at(sample).stages
        assert again.digest_at(sample + 20) == whole.digest_at(sample + 20)


def test_token_counts_of_billions() -> None:
    """`--data-path A B` without weights: each source weighs as much as it has tokens."""
    config = _data([3_000_000_019, 1_200_000_013])
    state = _state(_stream(config), 10)
    assert _stream(config, state, "stage").accepted == ()
    assert [s.weight for s in StreamConfig.from_dict(state.config).sources] == [3_000_000_019, 1_200_000_013]


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(
    weights=st.lists(WEIGHT, min_size=2, max_size=4),
    packing=st.sampled_from([{"mode": mode} for mode in MODES]),
    renamed=st.booleans(),
    rng=st.randoms(use_true_random=False),
)
def test_the_order_of_writing_is_no_part_of_the_order(
    weights: list[Any], packing: dict[str, Any], renamed: bool, rng: random.Random
) -> None:
    """From the start, at a resume and, with new names, at the one after it: every sample, by name, and the digest."""
    config = _data(weights, packing)
    whole = _stream(config)
    shuffled = _shuffled(config, rng)
    assume(list(shuffled["sources"]) != list(config["sources"]))
    assert _samples(_stream(shuffled), 0, 60) == _samples(whole, 0, 60)
    state = _state(_stream(shuffled), 20)
    again = _shuffled(config, rng)
    if renamed:  # to a name that comes elsewhere in the alphabet
        again["sources"] = {f"z{n}" if n == "s10" else n: _renamed(n, e) for n, e in again["sources"].items()}
    resumed = _stream(again, state)
    assert _samples(resumed, 20, 60) == _samples(whole, 20, 60)
    state = _state(resumed, 40)
    last = {n: {k: v for k, v in e.items() if k != "was"} for n, e in again["sources"].items()}
    final = _stream(_shuffled(again | {"sources": last}, rng), state)
    assert _samples(final, 40, 60) == _samples(whole, 40, 60) and final.digest_at(60) == whole.digest_at(60)


def _renamed(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    return entry | ({"was": name} if name == "s10" else {})


def _shuffled(data: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    names = list(data["sources"])
    rng.shuffle(names)
    return data | {"sources": {name: data["sources"][name] for name in names}}


def _samples(stream: Stream, first: int, stop: int) -> list[Any]:
    names = [source.name for source in stream.config.sources]
    return [[(names[s.source], s.epoch, s.document, s.offset, s.length) for s in x] for x in stream.plan(first, stop)]
