"""Stages, declared and begun at a resume: against the reference, from every position, and the promises counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.stream.batches import BatchSchedule
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import ConfigError, StateError, StreamExhausted
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList, assert_exact_resume, assert_same_samples
from tests.stream.reference import reference_digests, reference_samples

Configs = Callable[..., st.SearchStrategy[tuple[dict[str, Any], dict[str, list[int]]]]]
StreamOf = Callable[..., Stream]

NUM_SAMPLES = 70

DATA: dict[str, Any] = {
    "seed": 5,
    "seq_length": 128,
    "packing": {"mode": "best_fit", "open_bins": 4, "max_age": 50},
    "sources": {"a": {"weight": 3}, "b": {"weight": 1}, "c": {"weight": 0}},
    "stages": [
        {"from_samples": 20, "weights": {"a": 1, "b": 1, "c": 2}},
        {"from_tokens": 6000, "seq_length": 64, "name": "short"},
        {"from_tokens": 9000, "packing": "split"},
    ],
}
LENGTHS = {"a": [5, 70, 128, 300, 0, 44, 12], "b": [90, 1, 64, 33], "c": [200, 17, 128, 128, 3]}


@st.composite
def _stages(draw: st.DrawFn, data: dict[str, Any]) -> dict[str, Any]:
    """Other weights, packings and sequence lengths, as a stage has them."""
    changes: dict[str, Any] = {}
    for kind in draw(st.sets(st.sampled_from(["weights", "packing", "seq_length"]), min_size=1)):
        if kind == "weights":
            weights = [draw(st.sampled_from([0, 1, 2, 5])) for _ in data["sources"]]
            weights[draw(st.integers(0, len(weights) - 1))] += 1
            changes["weights"] = dict(zip(data["sources"], weights, strict=True))
        elif kind == "seq_length":
            changes["seq_length"] = 40 * draw(st.sampled_from([1, 2, 3]))
        else:
            filled = any("packing" in source for source in data["sources"].values())
            mode = draw(st.sampled_from(["best_fit", "split", *([] if filled else ["knapsack", "none"])]))
            changes["packing"] = {"mode": mode, "align": draw(st.sampled_from([1, 2, 4]))}
            if mode == "best_fit":
                changes["packing"]["open_bins"] = draw(st.sampled_from([1, 2, 5]))
            elif mode == "knapsack":
                changes["packing"]["lookahead"] = draw(st.sampled_from([1, 2, 5]))
            if mode in ("best_fit", "knapsack"):
                changes["packing"]["max_age"] = draw(st.sampled_from([1, 3, 1000]))
    return changes


def _divisible(data: dict[str, Any]) -> dict[str, Any]:
    """With a sequence length that every alignment divides."""
    return data | {"seq_length": 40, "packing": data["packing"] | {"align": 2}}


def _compare(stream: Stream, config: StreamConfig, lengths: dict[str, list[int]], num_samples: int) -> int:
    reference = list(reference_samples(config, lengths, num_samples))
    plan = stream.plan(0, len(reference))
    for k, expected in enumerate(reference):
        found = plan.table[plan.starts[k] : plan.starts[k + 1]].tolist()
        assert found == [list(s) for s in expected], f"sample {k}"
    assert plan.digests.tolist() == list(reference_digests(reference, [s.name for s in config.sources]))
    return len(reference)


@settings(max_examples=40)
@given(drawn=st.data())
def test_declared_stages_equal_the_reference(configs: Configs, drawn: st.DataObject, stream_of: StreamOf) -> None:
    data, lengths = drawn.draw(configs())
    data = _divisible(data)
    at = 0
    unit = drawn.draw(st.sampled_from(["samples", "tokens"]))
    data["stages"] = []
    for _ in range(drawn.draw(st.integers(1, 3))):
        at += drawn.draw(st.integers(1, 30 if unit == "samples" else 900))
        data["stages"].append({f"from_{unit}": at} | drawn.draw(_stages(data)))
    num = _compare(stream_of(data, lengths), StreamConfig.from_dict(data), lengths, NUM_SAMPLES)
    # From any position the same, and the state of a resumed stream is that of one which was never stopped.
    sample = drawn.draw(st.integers(0, num))
    whole = stream_of(data, lengths)
    state = StreamState.from_json(whole.state_at(sample).to_json())
    resumed = stream_of(data, lengths, state)
    assert_same_samples(resumed.plan(sample, num), whole.plan(sample, num))
    assert resumed.state_at(num) == whole.state_at(num)


@settings(max_examples=40)
@given(drawn=st.data())
def test_stages_created_at_a_resume_equal_declared_ones(
    configs: Configs, drawn: st.DataObject, stream_of: StreamOf
) -> None:
    """Kill, edit data.yaml, resume, any number of times: the same stream as if all had been declared beforehand."""
    data, lengths = drawn.draw(configs())
    data = _divisible(data)
    declared = copy.deepcopy(data)
    edited, state, sample = copy.deepcopy(data), None, 0
    reference_length = len(list(reference_samples(StreamConfig.from_dict(data), lengths, NUM_SAMPLES)))
    for _ in range(drawn.draw(st.integers(1, 4))):
        stream = _stream(edited, lengths, state)
        sample = min(sample + drawn.draw(st.integers(1, 20)), reference_length)
        try:
            state = StreamState.from_json(stream.state_at(sample).to_json())
        except StreamExhausted:  # with another packing it ends earlier
            break
        change = drawn.draw(_stages(data))
        before = _normal(edited, data)
        if "weights" in change:
            for name, weight in change["weights"].items():
                edited["sources"][name]["weight"] = weight
        edited |= {key: value for key, value in change.items() if key != "weights"}
        if drawn.draw(st.booleans()):
            edited["sources"] = dict(reversed(edited["sources"].items()))
        if _normal(edited, data) == before:
            continue  # no change, no stage
        declared.setdefault("stages", [])
        declared["stages"] = [s for s in declared["stages"] if s["from_samples"] != sample]
        declared["stages"].append(
            {
                "from_samples": sample,
                "weights": {n: s["weight"] for n, s in edited["sources"].items()},
                "seq_length": edited["seq_length"],
                "packing": edited["packing"],
            }
        )
    resumed = _stream(edited, lengths, state)
    config = StreamConfig.from_dict(declared)
    reference = list(reference_samples(config, lengths, NUM_SAMPLES))
    start = resumed.start
    plan = resumed.plan(start, max(len(reference), start))
    for k in range(len(plan)):
        assert plan.table[plan.starts[k] : plan.starts[k + 1]].tolist() == [list(s) for s in reference[start + k]]


def _normal(edited: dict[str, Any], data: dict[str, Any]) -> StreamConfig:
    return StreamConfig.from_dict(edited | {"sources": {name: edited["sources"][name] for name in data["sources"]}})


def _stream(
    data: dict[str, Any], lengths: dict[str, list[int]], state: StreamState | None, on_change: Any = "stage"
) -> Stream:
    config = StreamConfig.from_dict(data)
    return Stream(config, [LengthList(lengths[s.name]) for s in config.sources], state=state, on_change=on_change)


def test_exact_resume_at_every_sample(stream_of: StreamOf) -> None:
    assert_exact_resume(lambda state: stream_of(DATA, LENGTHS, state), 220)
    last = stream_of(DATA, LENGTHS).state_at(220)
    assert [stage.name for stage in last.stages] == ["start", "stage 1", "short", "stage 3"]


def test_a_stage_by_tokens_begins_at_the_first_sample_that_has_them(stream_of: StreamOf) -> None:
    stream = stream_of(DATA, LENGTHS)
    state = stream.state_at(220)
    tokens = stream.plan(0, 220).tokens().cumsum().tolist()
    for stage, at in zip(state.stages[2:], (6000, 9000), strict=True):
        assert tokens[stage.first - 1] >= at > tokens[stage.first - 2]
    assert stream.config_at(state.stages[2].first - 1).seq_length == 128
    assert stream.config_at(state.stages[2].first).seq_length == 64


def test_nothing_lost_and_nothing_twice(stream_of: StreamOf) -> None:
    """Through all stages, sequence lengths too, every token of every source comes exactly once an epoch."""
    stream = stream_of(DATA, LENGTHS)
    plan, state = stream.plan(0, 400), stream.state_at(400)
    waiting = state.waiting
    for i, (name, lengths) in enumerate(LENGTHS.items()):
        mine = plan.table[:, 0] == i
        rows = [(e, d, o, n) for e, (d, o, n) in zip(plan.epochs()[mine], plan.table[mine, 2:].tolist(), strict=True)]
        order = plan.orders[i]
        rows += [
            (order.epoch_of(s.position), int(order.documents_at(np.array([s.position]))[0]), s.offset, s.length)
            for s in waiting
            if s.source == i
        ]
        assert state.sources[name].epoch >= 2
        for epoch in range(state.sources[name].epoch):
            for document, length in enumerate(lengths):
                end = 0
                for offset, num in sorted((o, n) for e, d, o, n in rows if (e, d) == (epoch, document)):
                    assert offset == end
                    end += num
                assert end == length


def test_the_blend_error_starts_at_zero_in_each_stage(stream_of: StreamOf) -> None:
    """Within a stage no source is a document ahead of its share or behind it; nothing is caught up from before."""
    data = DATA | {"blend": {"unit": "documents"}}
    stream = stream_of(data, LENGTHS)
    for sample in range(1, 300):
        config = stream.config_at(sample)
        drawn = {name: c.drawn_in_stage for name, c in stream.state_at(sample).sources.items()}
        total, parts = sum(drawn.values()), sum(s.weight for s in config.sources)
        for source in config.sources:
            assert abs(drawn[source.name] - total * source.weight / parts) < 1, (sample, source.name)


def test_bins_stay_as_they_are_where_only_the_blend_changes(stream_of: StreamOf) -> None:
    stream = stream_of(DATA, LENGTHS)
    alone = stream_of({k: v for k, v in DATA.items() if k != "stages"}, LENGTHS)
    assert stream.state_at(20).bins == alone.state_at(20).bins != ()
    assert stream.state_at(20).stages[-1].first == 20 and len(alone.state_at(20).stages) == 1


def test_documents_in_open_bins_come_first_where_the_packing_changes(stream_of: StreamOf) -> None:
    data = {k: v for k, v in DATA.items() if k != "stages"}
    before = stream_of(data, LENGTHS).state_at(33)
    state = _stream(data | {"packing": "split"}, LENGTHS, before).state_at(33)
    assert not state.bins and state.pending == (*(s for b in before.bins for s in b.segments), *before.pending)
    plan = _stream(data | {"packing": "split"}, LENGTHS, before).plan(33, 60)
    first = [(s, p, o) for s, p, _, o, _ in plan.table.tolist()][: len(state.pending)]
    assert first[0] == (state.pending[0].source, state.pending[0].position, state.pending[0].offset)


def test_a_change_is_refused_unless_it_is_wanted(stream_of: StreamOf) -> None:
    data = {k: v for k, v in DATA.items() if k != "stages"}
    state = stream_of(data, LENGTHS).state_at(30)
    changed = data | {"sources": {"a": {"weight": 1}, "b": {"weight": 1}, "c": {"weight": 0}}}
    with pytest.raises(StateError, match="the data config is not the one") as error:
        stream_of(changed, LENGTHS, state)
    assert "sources.a.weight 1" in str(error.value.found) and "sources.a.weight 3" in str(error.value.expected)
    assert "--megaresume-on-change stage" in str(error.value.action)
    stream = _stream(changed, LENGTHS, state)
    later = stream.state_at(40)
    assert [s.first for s in later.stages] == [0, 30]
    assert later.overrides == ("at sample 30: sources.a.weight 3 -> 1",)
    # From then on it is the config of the run: no flag is needed, and going back would be a change.
    assert stream_of(changed, LENGTHS, later).state_at(40) == later
    with pytest.raises(StateError, match="the data config is not the one"):
        stream_of(data, LENGTHS, later)


def test_a_source_added_and_one_removed(stream_of: StreamOf) -> None:
    data = {"seq_length": 64, "packing": "none", "sources": {"a": {"weight": 3}, "b": {"weight": 1}}}
    state = stream_of(data, LENGTHS).state_at(30)
    added = data | {"sources": {"new": {"weight": 2}, "a": {"weight": 3}, "b": {"weight": 1}}}
    stream = _stream(added, LENGTHS | {"new": [10, 20]}, state)
    assert [s.name for s in stream.config.sources] == ["a", "b", "new"]  # what was keeps its number
    later = stream.state_at(50)
    assert later.sources["new"].documents > 0 and later.sources["a"].position > state.sources["a"].position
    sample = next(k for k in range(50, 90) if not {s.source for s in stream.state_at(k).waiting} & {0})
    removed = {"seq_length": 64, "packing": "none", "sources": {"new": {"weight": 2}, "b": {"weight": 1}}}
    gone = _stream(removed, LENGTHS | {"new": [10, 20]}, stream.state_at(sample))
    last = gone.state_at(90)
    assert last.sources["a"] == stream.state_at(sample).sources["a"]._replace(drawn_in_stage=0)
    assert 0 not in gone.plan(sample, 90).table[:, 0].tolist()
    assert StreamState.from_json(last.to_json()) == last
    # Gone it stays, without a flag; and it can come back, where it was.
    assert _stream(removed, LENGTHS | {"new": [10, 20]}, last, "refuse").state_at(90) == last
    back = _stream(added, LENGTHS | {"new": [10, 20]}, last).plan(90, 120)
    first = next(p for s, p, *_ in back.table.tolist() if s == 0)
    assert first == last.sources["a"].position


def test_a_source_whose_documents_wait_cannot_be_removed(stream_of: StreamOf) -> None:
    data = {"seq_length": 64, "packing": "split", "sources": {"a": {"weight": 3}, "b": {"weight": 1}}}
    stream = stream_of(data, LENGTHS)
    sample = next(k for k in range(20, 50) if 0 in {s.source for s in stream.state_at(k).waiting})
    with pytest.raises(StateError, match="source 'a' cannot be removed yet") as error:
        _stream(data | {"sources": {"b": {}}}, LENGTHS, stream.state_at(sample))
    assert "weight 0" in str(error.value.action)


def test_the_future_is_free_and_the_past_is_not(stream_of: StreamOf) -> None:
    state = stream_of(DATA, LENGTHS).state_at(40)  # after the first of the declared stages
    future = copy.deepcopy(DATA)
    future["stages"][2:] = [{"from_tokens": 7000, "weights": {"a": 1, "b": 0, "c": 0}}]
    stream = stream_of(future, LENGTHS, state)
    later = stream.state_at(150)
    assert later.overrides == ("at sample 40: the stages to come were changed",)
    assert [s.name for s in later.stages] == ["start", "stage 1", "short", "stage 3"]
    past = copy.deepcopy(DATA)
    past["stages"][0]["weights"]["c"] = 5
    with pytest.raises(StateError, match="the data config is not the one") as error:
        stream_of(past, LENGTHS, state)
    assert "stages.0.weights.c 5" in str(error.value.found) and "stages.0.weights.c 2" in str(error.value.expected)
    new = copy.deepcopy(DATA)
    new["stages"].insert(1, {"from_samples": 30, "weights": {"a": 1, "b": 0, "c": 0}})
    with pytest.raises(StateError, match="the data config is not the one"):
        stream_of(new, LENGTHS, state)


def test_the_order_in_which_sources_are_written_says_nothing() -> None:
    """Of stages neither: one that has begun is the same stage, one to come has not changed."""

    def opened(data: dict[str, Any], state: StreamState | None = None) -> Stream:
        config = StreamConfig.from_dict(data)
        return Stream(config, [LengthList(LENGTHS[s.name]) for s in config.sources], state=state)

    turned = DATA | {"sources": dict(reversed(DATA["sources"].items()))}
    whole = opened(DATA)
    for sample in (10, 20, 30):  # before the first of them, where it begins, behind
        state = StreamState.from_json(whole.state_at(sample).to_json())
        again = opened(turned, state)
        assert again.accepted == () and again.digest_at(60) == whole.digest_at(60)


def test_the_seed_is_always_refused(stream_of: StreamOf) -> None:
    state = stream_of(DATA, LENGTHS).state_at(40)
    for on_change in ("refuse", "stage"):
        with pytest.raises(StateError, match="the data config is not the one") as error:
            _stream(DATA | {"seed": 6}, LENGTHS, state, on_change)
        assert error.value.found == "seed 6" and error.value.expected == "seed 5"
        assert str(error.value.action).startswith("use seed 5 again (data.yaml: seed; DataLoader(seed=5); Trainer: ")


def test_the_same_change_twice(stream_of: StreamOf) -> None:
    """A run that dies before its first save in a new stage begins that stage again at the same place."""
    data = {k: v for k, v in DATA.items() if k != "stages"}
    state = stream_of(data, LENGTHS).state_at(30)
    first, second = (_stream(data | {"seq_length": 64}, LENGTHS, state) for _ in range(2))
    assert_same_samples(first.plan(30, 90), second.plan(30, 90))
    assert first.state_at(90) == second.state_at(90)


def test_the_recorded_stages_plan_the_past_again(stream_of: StreamOf) -> None:
    data = {k: v for k, v in DATA.items() if k != "stages"}
    first = stream_of(data, LENGTHS)
    stream = _stream(data | {"packing": "split"}, LENGTHS, first.state_at(30))
    last = stream.state_at(80)
    config = StreamConfig.from_dict(data | {"packing": "split"})
    again = Stream(config, [LengthList(LENGTHS[s.name]) for s in config.sources], past=last)
    assert again.digest_at(30) == first.digest_at(30) and again.digest_at(80) == last.digest
    assert again.state_at(80).stages == last.stages


def test_a_stage_by_step(stream_of: StreamOf) -> None:
    data = DATA | {"stages": [{"from_step": 10, "weights": {"a": 1, "b": 1, "c": 2}}]}
    stream = stream_of(data, LENGTHS)
    with pytest.raises(ConfigError, match="begins at a step, but the batch sizes are not known"):
        stream.plan(0, 60)
    stream.schedule = BatchSchedule(((0, 2), (8, 4)))  # 4 steps of 2, then of 4
    assert [s.first for s in stream.state_at(60).stages] == [0, 32]
    declared = DATA | {"stages": [{"from_samples": 32, "weights": {"a": 1, "b": 1, "c": 2}}]}
    assert_same_samples(stream.plan(0, 100), stream_of(declared, LENGTHS).plan(0, 100))


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ({"from_samples": 3}, "does not say what it changes"),
        ({"weights": {"a": 1, "b": 1, "c": 1}}, "does not say when it begins"),
        ({"from_samples": 3, "from_tokens": 4, "seq_length": 8}, "does not say when it begins"),
        ({"from_samples": 3, "weights": {"a": 1}}, "leaves sources out"),
        ({"from_samples": 3, "weights": {"a": 1, "b": 1, "c": 1, "d": 1}}, "unknown key 'd'"),
        ({"from_samples": 0, "seq_length": 8}, "bad value of stages"),
        (
            {"from_samples": 3, "seq_length": 8, "packing": {"mode": "split", "align": 3}},
            "not a multiple of packing.align in stage",
        ),
        ({"from_samples": 3, "name": "", "seq_length": 8}, "bad name"),
    ],
)
def test_bad_stages(stage: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StreamConfig.from_dict(DATA | {"stages": [stage]})


def test_stages_out_of_order() -> None:
    stages = [{"from_samples": 30, "seq_length": 64}, {"from_samples": 20, "seq_length": 128}]
    with pytest.raises(ConfigError, match="does not come after"):
        StreamConfig.from_dict(DATA | {"stages": stages})
