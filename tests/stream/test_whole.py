"""Documents that must never be cut are not: by no packing, in no stage, at no resume."""

from __future__ import annotations

from typing import Any

import pytest

from megaresume.stream.config import OnChange, StreamConfig
from megaresume.stream.errors import ConfigError
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList


class Whole(LengthList):
    whole = True


LENGTHS = [10, 64, 3, 50] * 10


def _stream(state: StreamState | None = None, on_change: OnChange = "refuse", **config: Any) -> Stream:
    data = {"seq_length": 64, "packing": "best_fit", "sources": {"text": 1, "pairs": 1}} | config
    data["sources"] = {name: {"weight": weight} for name, weight in data["sources"].items()}
    sources = {"text": LengthList([500, 20]), "pairs": Whole(LENGTHS)}
    config_ = StreamConfig.from_dict(data)
    return Stream(config_, [sources[s.name] for s in config_.sources], state=state, on_change=on_change)


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_whole_documents_stay_whole(packing: str) -> None:
    plan = _stream(packing=packing).plan(0, 60)
    pairs = plan.table[plan.table[:, 0] == 1]
    assert len(pairs) > 20
    assert pairs[:, 3].tolist() == [0] * len(pairs)
    assert pairs[:, 4].tolist() == [LENGTHS[document] for document in pairs[:, 2]]


def test_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="would cut documents of source 'pairs' that must stay whole"):
        _stream(packing="split")
    _stream(packing="split", sources={"text": 1, "pairs": 0})  # nothing of it is drawn


def test_a_document_longer_than_a_sample_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"up to 64 tokens, and samples of 60[\s\S]*max_tokens: 60"):
        _stream(seq_length=60)


@pytest.mark.parametrize("change", [{"packing": "split"}, {"seq_length": 32}])
def test_a_declared_stage_is_refused_at_once(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="in stage 'stage 2'"):
        _stream(stages=[{"from_samples": 100, "seq_length": 128}, {"from_samples": 200, "name": "stage 2", **change}])


def test_a_stage_that_begins_at_a_resume_is_refused() -> None:
    state = _stream().state_at(10)
    with pytest.raises(ConfigError, match="longer than a sample"):
        _stream(state, "stage", seq_length=32)
