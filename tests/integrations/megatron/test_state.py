"""The string on ``args``: read back, refused when it is not whole, kept as an example of each format."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from typing import Any

import pytest

from megaresume.integrations.megatron.state import FORMAT, KEY, SavedState, read_state, state_on, write_state
from megaresume.stream.errors import StateError

#: as format 1 was written; never to be changed.
EXAMPLES = {
    1: '{"format":1,"project":"megatron-lm","version":"0.16.1","iteration":10,"samples":320,"guard":{"since":0,'
    '"weights":["0.6","0.4"]},"checksum":"32e12f582b9e0c51b2663022a22252e3"}'
}


def written(**changes: Any) -> str:
    fields: dict[str, Any] = {
        "project": "megatron-lm",
        "version": "0.16.1",
        "iteration": 10,
        "samples": 320,
        "kind": "guard",
        "payload": {"since": 0, "weights": ["0.6", "0.4"]},
    }
    return write_state(**fields | changes)


def test_round_trip() -> None:
    text = written()
    state = read_state(text)
    assert state == SavedState(
        project="megatron-lm",
        version="0.16.1",
        iteration=10,
        samples=320,
        kind="guard",
        payload={"since": 0, "weights": ["0.6", "0.4"]},
        text=text,
    )
    assert (state.guard, state.stream, state.text) == (state.payload, None, text)
    assert read_state(written(kind="stream")).stream == state.payload
    assert type(text) is str and text.isascii()
    assert read_state(written(version=None)).version == "unknown"


def test_examples_of_every_format() -> None:
    assert list(EXAMPLES) == list(range(1, FORMAT + 1))
    for text in EXAMPLES.values():
        assert read_state(text) == read_state(written())


def test_where_it_lies() -> None:
    text = written()
    for args in (Namespace(**{KEY: text}), {KEY: text}):
        assert state_on(args) == text
    assert state_on(Namespace()) is None
    assert state_on({}) is None
    assert state_on(None) is None
    assert state_on(Namespace(**{KEY: ""})) is None


@pytest.mark.parametrize("length", [1, 20, 100, -2, -1])
def test_truncated(length: int) -> None:
    with pytest.raises(StateError, match="unreadable"):
        read_state(written()[:length])


@pytest.mark.parametrize("value", [b"{}", 7, "[]", "null", {"format": 1}])
def test_no_text_of_ours(value: object) -> None:
    with pytest.raises(StateError, match="unreadable"):
        read_state(value)


def changed(**changes: Any) -> str:
    """With a right checksum."""
    from megaresume.integrations.megatron import state

    body = {key: value for key, value in json.loads(written()).items() if key != "checksum"} | changes
    body = {key: value for key, value in body.items() if value is not None}
    return json.dumps(body | {"checksum": state.checksum(body)})


def test_any_changed_character_is_noticed() -> None:
    text = written()
    for match in re.finditer("[0-9]", text):
        other = "1" if match[0] != "1" else "2"
        with pytest.raises(StateError):
            read_state(text[: match.start()] + other + text[match.end() :])


def test_newer_and_unknown_formats() -> None:
    with pytest.raises(StateError) as error:
        read_state(changed(format=FORMAT + 1))
    assert "pip install --upgrade megaresume" in str(error.value)
    for version in (0, -1, "1", True):
        with pytest.raises(StateError, match="cannot read"):
            read_state(changed(format=version))


@pytest.mark.parametrize(
    "changes",
    [
        {"guard": None},
        {"stream": {}},
        {"guard": "x"},
        {"samples": -1},
        {"samples": 1.5},
        {"iteration": None},
        {"project": 1},
        {"version": None},
    ],
)
def test_wrong_fields(changes: dict[str, Any]) -> None:
    with pytest.raises(StateError, match="lacks a field"):
        read_state(changed(**changes))
