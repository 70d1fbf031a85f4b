"""A renamed source goes on where it was, under its first name, for ever."""

from __future__ import annotations

from typing import Any

import pytest

from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import ConfigError, MegaresumeError, StateError
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList

LENGTHS = {"web": [5, 9, 3, 30, 7, 2], "code": [4, 12, 6]}


def _data(sources: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"seq_length": 16, "packing": "best_fit", "sources": sources, **more}


def _stream(data: dict[str, Any], state: StreamState | None = None, **options: Any) -> Stream:
    config = StreamConfig.from_dict(data)
    which = [LENGTHS["code" if "code" in (s.name, s.label) else "web"] for s in config.sources]
    return Stream(config, [LengthList(lengths) for lengths in which], state=state, **options)


def _saved(stream: Stream, sample: int) -> StreamState:
    return StreamState.from_json(stream.state_at(sample).to_json())


ONE = {"web": {"weight": 2}, "code": {}}


def test_renamed_twice_and_without_a_word() -> None:
    whole = _stream(_data(ONE))
    second = _stream(_data({"code": {}, "web2": {"was": "web", "weight": 2}}), _saved(whole, 10))
    assert second.accepted == ("at sample 10: source 'web' is called 'web2'",)
    third = _stream(_data({"web3": {"was": "web2", "weight": 2}, "code": {}}), _saved(second, 20))
    assert third.accepted == ("at sample 20: source 'web2' is called 'web3'",)
    # It was recorded: the alias may go, and may stay, also under a first name that is long gone.
    for entry in ({}, {"was": "web2"}, {"was": "web"}):
        fourth = _stream(_data({"web3": {"weight": 2} | entry, "code": {}}), _saved(third, 30))
        assert fourth.accepted == ()
        assert fourth.state_at(80).digest == whole.state_at(80).digest
    last = _saved(fourth, 80)
    assert list(last.sources) == ["web", "code"] and last.config["sources"]["web"]["names"] == ["web2", "web3"]
    again = _stream(last.config, past=last)  # type: ignore[arg-type]
    assert again.digest_at(80) == last.digest


def test_stages_and_skips_go_by_the_name_of_today() -> None:
    renamed = _data(
        {"web2": {"was": "web", "weight": 2}, "code": {}},
        stages=[{"from_samples": 15, "weights": {"web2": 1, "code": 1}}],
        skip={"documents": {"web2": [3]}},
    )
    plain = _data(
        ONE, stages=[{"from_samples": 15, "weights": {"web": 1, "code": 1}}], skip={"documents": {"web": [3]}}
    )
    assert _stream(renamed).state_at(60).digest == _stream(plain).state_at(60).digest
    state = _saved(_stream(_data(ONE)), 10)
    assert _stream(renamed, state).state_at(60).digest == _stream(plain, state).state_at(60).digest


@pytest.mark.parametrize(
    ("sources", "error"),
    [
        ({"web2": {"was": "web"}, "web": {}}, "is still there"),
        ({"a": {"was": "b"}, "b": {"was": "a"}}, "a cycle"),
        ({"web": {"was": "web"}}, "said to have been itself"),
        ({"a": {"was": "web"}, "b": {"was": "web"}}, "two sources are said to have been 'web'"),
        ({"a": {"was": 3}}, "bad value of sources.a.was"),
        ({"a": {"was": []}}, "bad value of sources.a.was"),
    ],
)
def test_bad_aliases(sources: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        StreamConfig.from_dict(_data(sources))
    assert error in str(raised.value)


def test_an_alias_to_nothing_and_a_name_taken() -> None:
    state = _saved(_stream(_data(ONE)), 10)
    with pytest.raises(StateError, match="one that the run never had") as raised:
        _stream(_data({"web2": {"was": "wbe", "weight": 2}, "code": {}}), state)
    assert "web, code" in str(raised.value.expected)
    renamed = _saved(_stream(_data({"web2": {"was": "web", "weight": 2}, "code": {}}), state), 20)
    with pytest.raises(MegaresumeError, match="is a name that source"):
        _stream(_data({"web2": {"weight": 2}, "code": {}, "web": {}}), renamed, on_change="stage")
