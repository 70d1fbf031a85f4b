"""Settings in Python that are made with other arguments than they have."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from megaresume import Balance, BatchSchedule, StreamConfig
from megaresume.stream.errors import UsageError


@pytest.mark.parametrize(
    ("make", "name", "nearest"),
    [
        (Balance, "objectiv", "objective"),
        (StreamConfig, "seq_len", "seq_length"),
        (BatchSchedule, "segment", "segments"),
    ],
)
def test_a_slip_in_a_name(make: Any, name: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"unknown argument of {make.__name__}") as caught:
        make(**{name: "step"})
    error = caught.value
    assert (error.found, error.cause) == (f"{make.__name__}({name}='step')", f"did you mean '{nearest}'?")
    assert error.action == f"write {nearest}" and nearest in str(error.expected)


def test_a_name_that_resembles_none() -> None:
    with pytest.raises(UsageError, match="unknown argument of StreamConfig") as caught:
        StreamConfig(zzz=3)  # type: ignore[call-arg]
    assert "StreamConfig.from_dict" in str(caught.value.action)


def test_what_is_missing() -> None:
    with pytest.raises(UsageError, match="StreamConfig is given no seed") as caught:
        StreamConfig(seq_length=8)  # type: ignore[call-arg]
    error = caught.value
    assert (error.found, error.expected) == ("StreamConfig(seq_length=8)", "also seed, packing, blend, sources")
    with pytest.raises(UsageError, match="BatchSchedule is given no segments"):
        BatchSchedule()  # type: ignore[call-arg]


def test_without_a_name() -> None:
    with pytest.raises(UsageError, match="Balance takes its settings by name") as caught:
        Balance("step")  # type: ignore[misc]
    assert caught.value.action == "write Balance(objective='step')"
    with pytest.raises(UsageError, match="BatchSchedule takes its settings by name"):
        BatchSchedule(((0, 8),), 3)  # type: ignore[call-arg]


def test_of_another_type() -> None:
    with pytest.raises(UsageError, match="bad value of token_cost"):
        Balance(token_cost="64")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"bad value of objective(.|\n)*did you mean 'micro-step'"):
        Balance(objective="micro_step")  # type: ignore[arg-type]


def test_copies_are_made_as_ever() -> None:
    config = StreamConfig.from_dict({"seq_length": 8, "sources": {"a": {}}})
    for made in (Balance(token_cost=64), BatchSchedule(((0, 8),)), config):
        assert pickle.loads(pickle.dumps(made)) == replace(made) == made
