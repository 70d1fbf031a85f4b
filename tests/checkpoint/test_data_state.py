"""The envelope of a state: read back, refused if it is not whole, kept as an example of each version."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

from megaresume.checkpoint.records.envelope import VERSION, Envelope, OpaqueState, stream_of
from megaresume.hosts.megatron.host import KEY, envelope_on
from megaresume.stream.errors import NewerFormatError, StateError
from megaresume.stream.state import StreamState
from megaresume.stream.state_text import checksum

ORDER = OpaqueState(
    kind="order", samples=320, digest="0123456789abcdef", content={"since": 0, "weights": ["0.6", "0.4"]}
)
ENVELOPE = Envelope(state=ORDER, iteration=10, framework="megatron-lm 0.16.1")
#: as version 1 was written; never to be changed.
EXAMPLES = {
    1: '{"format":"megaresume.data","version":1,"kind":"order","framework":"megatron-lm 0.16.1","iteration":10,'
    '"samples":320,"digest":"0123456789abcdef","content":{"since":0,"weights":["0.6","0.4"]},'
    '"checksum":"62ed630d176d0143e73b31725f6e1b77"}'
}


def test_round_trip(state: Callable[..., StreamState]) -> None:
    for one in (ORDER, state(80)):
        envelope = Envelope(state=one, iteration=10, framework="deepspeed 0.18.2")
        text = envelope.to_text()
        assert Envelope.read(text) == Envelope.read(envelope.to_dict()) == envelope
        assert Envelope.read(text).to_text() == text and text.isascii()
        assert (envelope.kind, envelope.samples) == (one.kind, one.samples)


def test_examples_of_every_version() -> None:
    assert list(EXAMPLES) == list(range(1, VERSION + 1))
    for text in EXAMPLES.values():
        assert Envelope.read(text) == ENVELOPE


def test_only_a_stream_can_be_planned_again(state: Callable[..., StreamState]) -> None:
    assert stream_of(state(80)) == state(80)
    with pytest.raises(StateError, match="under guard"):
        stream_of(ORDER)
    with pytest.raises(StateError, match="trained on its own loader"):
        stream_of(OpaqueState(kind="loader", samples=0, digest="0" * 16, content={}))


def test_on_megatrons_arguments() -> None:
    text = ENVELOPE.to_text()
    for args in (Namespace(**{KEY: text}), {KEY: text}):
        assert envelope_on(args) == ENVELOPE
    for nothing in (Namespace(), {}, None, Namespace(**{KEY: ""})):
        assert envelope_on(nothing) is None


@pytest.mark.parametrize("length", [1, 20, 100, -2, -1])
def test_truncated(length: int) -> None:
    with pytest.raises(StateError, match="unreadable"):
        Envelope.read(ENVELOPE.to_text()[:length])


@pytest.mark.parametrize("value", [b"{}", 7, "[]", "null"])
def test_no_text_of_ours(value: object) -> None:
    with pytest.raises(StateError, match="unreadable"):
        Envelope.read(value)


@pytest.mark.parametrize("value", [{"format": 1}, {}])
def test_of_another_program(value: object) -> None:
    with pytest.raises(StateError, match="not a data state of megaresume"):
        Envelope.read(value)


def changed(**changes: Any) -> str:
    """With a right checksum."""
    body = {key: value for key, value in ENVELOPE.to_dict().items() if key != "checksum"} | changes
    body = {key: value for key, value in body.items() if value is not None}
    return json.dumps(body | {"checksum": checksum(body)})


def test_any_changed_digit_is_noticed() -> None:
    text = ENVELOPE.to_text()
    for match in re.finditer("[0-9]", text):
        other = "1" if match[0] != "1" else "2"
        with pytest.raises(StateError):
            Envelope.read(text[: match.start()] + other + text[match.end() :])


def test_newer_and_unknown_versions(state: Callable[..., StreamState]) -> None:
    with pytest.raises(NewerFormatError) as error:
        Envelope.read(changed(version=VERSION + 1))
    assert "pip install --upgrade megaresume" in str(error.value)
    newer = state(320).to_dict() | {"version": 99}
    with pytest.raises(NewerFormatError, match="the state of the stream was written by a newer"):
        Envelope.read(changed(kind="stream", content=newer, digest=state(320).digest))
    for version in (0, -1, "1", True):
        with pytest.raises(StateError, match="cannot read"):
            Envelope.read(changed(version=version))


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": None},
        {"kind": "guard"},
        {"content": "x"},
        {"samples": -1},
        {"samples": 1.5},
        {"iteration": None},
        {"framework": 1},
        {"digest": "xyz"},
    ],
)
def test_wrong_fields(changes: dict[str, Any]) -> None:
    with pytest.raises(StateError, match="lacks a field"):
        Envelope.read(changed(**changes))


def test_a_stream_at_another_sample(state: Callable[..., StreamState]) -> None:
    with pytest.raises(StateError, match="lacks a field"):
        Envelope.read(changed(kind="stream", content=state(80).to_dict()))
