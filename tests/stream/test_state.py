"""The state as JSON: what goes in comes out, and nothing else is ever taken for a state."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from megaresume.stream.data_yaml import MODES
from megaresume.stream.errors import NewerFormatError, StateError
from megaresume.stream.skips import SkipConfig
from megaresume.stream.state import VERSION, StreamState
from megaresume.stream.state_text import FIELDS, checksum
from megaresume.stream.stream import Stream

DATA = {
    "seq_length": 64,
    "packing": {"mode": "best_fit", "open_bins": 3},
    "sources": {"web": {"weight": 2}, 'Ünï"code\\ 日本': {"weight": 1, "max_epochs": 4}, "a": {"weight": 0}},
}
LENGTHS = {"web": [3, 40, 7, 0, 12, 64, 90, 1, 33], 'Ünï"code\\ 日本': [130, 5, 64, 20], "a": []}


@pytest.fixture
def state(stream_of: Callable[..., Stream]) -> StreamState:
    """With open bins, a pending document, batches, and an override."""
    stream = stream_of(DATA, LENGTHS)
    sample = next(k for k in range(10, 50) if stream.state_at(k).pending)
    return stream.state_at(sample, batches=[(0, 4), (8, 2)], overrides=["accepted: seed 1 for 2"])


def test_round_trip(state: StreamState) -> None:
    data = state.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert state.bins and state.pending and state.batches and state.overrides
    for form in (data, state.to_json(), state.to_json().encode(), json.dumps(data, indent=2), f"\n{state.to_json()}\n"):
        assert StreamState.from_json(form) == state
    assert StreamState.from_json(state.to_json()).to_json() == state.to_json()


@pytest.mark.parametrize("packing", MODES)
def test_the_text_is_that_of_the_plain_json(stream_of: Callable[..., Stream], packing: str) -> None:
    """Step by step, so that parts of the text before are used again; also of another stream in between."""
    stages = [{"name": "late", "from_samples": 12, "weights": dict.fromkeys(LENGTHS, 0) | {"web": 1}}]
    streams = [stream_of(DATA | {"packing": packing} | more, LENGTHS) for more in ({"seed": 5}, {"stages": stages})]
    streams[1].skip(SkipConfig(samples=((3, 5),)))
    for sample in (0, 1, 2, 9, 12, 13, 14):
        for stream in streams:
            state = stream.state_at(sample, batches=[(0, 2)], faults=[(sample - 1, 'Ünï"code', 3, 0, "skip", "é")])
            text = state.to_json()
            assert text == json.dumps(json.loads(text), separators=(",", ":"))
            assert StreamState.from_json(text) == state and state.to_dict() == json.loads(text)
            assert StreamState.from_json(text).to_json() == text


@pytest.mark.parametrize("packing", ["split", "best_fit"])
@pytest.mark.parametrize("num_sources", [20, 300])
def test_a_state_is_the_same_whichever_was_taken_before(
    stream_of: Callable[..., Stream], packing: str, num_sources: int
) -> None:
    """As written out, and packed; what did not change since the last one is not made again."""
    rng = random.Random(num_sources)
    lengths = {f"s{k}": [rng.randint(1, 150) for _ in range(rng.randint(1, 9))] for k in range(num_sources)}
    sources: dict[str, Any] = {name: {"weight": rng.randint(1, 9)} for name in lengths}
    sources["s0"] |= {"max_epochs": 3}
    if packing == "best_fit":
        sources["s1"] |= {"packing": "split", "weight": num_sources}
    # Its pieces are other ones, also of sources that nothing was drawn from.
    longer = {"name": "longer", "from_samples": 9, "seq_length": 96}
    data = {"seq_length": 64, "packing": packing, "sources": sources, "stages": [longer]}
    stream = stream_of(data, lengths)
    stream.plan(0, 200)
    samples = [*range(60), *rng.sample(range(200), 20), 199, 200]
    texts = {sample: stream.state_at(sample).to_json() for sample in samples}
    for sample in samples[::3]:
        assert stream.state_at(sample).to_json() == stream_of(data, lengths).state_at(sample).to_json() == texts[sample]
    packed = json.loads(texts[200]).get("packed")
    assert (packed is not None) == (num_sources == 300)
    if packed is not None:  # in two parts, of which the first is kept: as in one
        deflated = base64.b85decode(packed)
        assert zlib.compress(zlib.decompress(deflated), 6) == deflated


def test_it_is_small_and_holds_no_place_and_no_rank(state: StreamState) -> None:
    text = state.to_json()
    assert len(text) < 4096
    assert not any(word in text for word in ("path", "rank", "worker", "device", "/"))


def test_keys_in_another_order(state: StreamState, stream_of: Callable[..., Stream]) -> None:
    """A container may sort keys; the order of the sources, which breaks ties, stays."""
    data = json.loads(json.dumps(state.to_dict(), sort_keys=True))
    read = StreamState.from_json(data)
    assert read == state
    names = list(DATA["sources"])
    assert list(read.sources) == list(read.fingerprints) == list(read.config["sources"]) == names != sorted(names)
    assert stream_of(DATA, LENGTHS, read).digest_at(60) == stream_of(DATA, LENGTHS).digest_at(60)


@pytest.mark.parametrize("nothing", [None, "", b"", " \n"])
def test_missing(nothing: Any) -> None:
    with pytest.raises(StateError, match="there is no data state"):
        StreamState.from_json(nothing)


def test_truncated_at_every_byte(state: StreamState) -> None:
    text = state.to_json().encode()
    for end in range(1, len(text)):
        with pytest.raises(StateError, match="the data state is unreadable") as error:
            StreamState.from_json(text[:end])
        assert f"{end} bytes that are not JSON" in str(error.value.found)


def test_every_flipped_bit(state: StreamState) -> None:
    text = state.to_json().encode()
    seen = set()
    for k in range(8 * len(text)):
        damaged = bytearray(text)
        damaged[k // 8] ^= 1 << k % 8
        try:
            # \u00dc and \u00DC are the same character: all that a bit may change without being noticed.
            assert StreamState.from_json(bytes(damaged)) == state
            assert bytes(damaged).lower() == text.lower()
        except StateError as error:
            seen.add(error.headline)
    assert seen == {
        "the data state is unreadable",
        "the data state is damaged",
        "this is not a data state of megaresume",
        "the data state has a version that this release cannot read",
        "the data state was written by a newer megaresume",
    }


def test_overwritten_and_shortened(state: StreamState) -> None:
    rng = random.Random(0)
    text = state.to_json().encode()
    for _ in range(2000):
        a, b = sorted(rng.sample(range(len(text)), 2))
        damaged = text[:a] + rng.choice([b"", bytes(b - a), rng.randbytes(b - a), b"0" * (b - a)]) + text[b:]
        if damaged != text:
            with pytest.raises(StateError):
                StreamState.from_json(damaged)


@pytest.mark.parametrize("foreign", ["{}", '{"iteration": 10}', {"format": "torch"}, '{"format": null}'])
def test_foreign(foreign: Any) -> None:
    with pytest.raises(StateError, match="not a data state of megaresume") as error:
        StreamState.from_json(foreign)
    assert "megaresume.stream-state" in str(error.value.expected)


@pytest.mark.parametrize("text", ["[]", "3", '"state"', "null", "true"])
def test_json_that_is_no_object(text: str) -> None:
    with pytest.raises(StateError, match="the data state is unreadable"):
        StreamState.from_json(text)


def test_not_utf8(state: StreamState) -> None:
    with pytest.raises(StateError, match="the data state is unreadable"):
        StreamState.from_json(b"\xff\xfe" + state.to_json().encode())


@pytest.mark.parametrize("version", [VERSION + 1, VERSION + 100])
def test_newer_version(state: StreamState, version: int) -> None:
    with pytest.raises(NewerFormatError, match="was written by a newer megaresume") as error:
        StreamState.from_json(_resealed(state.to_dict() | {"version": version}))
    assert error.value.found == f"version {version}" and "pip install --upgrade megaresume" in str(error.value)


@pytest.mark.parametrize("version", [0, -1, "1", 1.0, True, None])
def test_other_version(state: StreamState, version: Any) -> None:
    with pytest.raises(StateError, match="version that this release cannot read") as error:
        StreamState.from_json(_resealed(state.to_dict() | {"version": version}))
    assert error.value.found == f"version {version!r}"


def test_edited_by_hand(state: StreamState) -> None:
    with pytest.raises(StateError, match="the data state is damaged"):
        StreamState.from_json(state.to_dict() | {"samples": state.samples + 1})
    without = {k: v for k, v in state.to_dict().items() if k != "checksum"}
    with pytest.raises(StateError, match="the data state is damaged"):
        StreamState.from_json(without)


def _resealed(data: dict[str, Any]) -> dict[str, Any]:
    """With the checksum that belongs to the content: what a faulty writer would leave."""
    body = {k: v for k, v in data.items() if k != "checksum"}
    return body | {"checksum": checksum(body)}


#: fields that states written before them lack.
CAME_LATER: frozenset[str] = frozenset()


@pytest.mark.parametrize("key", FIELDS)
def test_every_field_is_needed(state: StreamState, key: str) -> None:
    data = state.to_dict()
    for value in (None, "x", -1, [[1]], {"a": {"b": 1}}):
        with pytest.raises(StateError, match="lacks a field or has one of the wrong kind"):
            StreamState.from_json(_resealed(data | {key: value}))
    without = _resealed({k: v for k, v in data.items() if k != key})
    if key in CAME_LATER:
        StreamState.from_json(without)
    else:
        with pytest.raises(StateError, match="lacks a field or has one of the wrong kind"):
            StreamState.from_json(without)


@pytest.mark.parametrize("value", [None, 7, [1], "web"])
def test_a_source_that_is_no_mapping(state: StreamState, value: Any) -> None:
    data = state.to_dict()
    for key, words in (("sources", "the state of a source"), ("fingerprints", "the fingerprint of a source")):
        with pytest.raises(StateError, match="lacks a field") as caught:
            StreamState.from_json(_resealed(data | {key: data[key] | {"web": value}}))
        assert f"{value!r} is not {words}" in str(caught.value)


@pytest.mark.parametrize("value", [-1, 1.5, True, "3", None, 1 << 63])
def test_numbers_that_are_no_counts(state: StreamState, value: Any) -> None:
    """They would become other numbers in the arrays of the planner."""
    data = state.to_dict()
    web = data["sources"]["web"]
    for key in web.keys() - {"exhausted"}:
        sources = data["sources"] | {"web": web | {key: value}}
        with pytest.raises(StateError, match="lacks a field or has one of the wrong kind"):
            StreamState.from_json(_resealed(data | {"sources": sources}))
    for k in range(4):
        pending = [[*data["pending"][0][:k], value, *data["pending"][0][k + 1 :]]]
        with pytest.raises(StateError, match="lacks a field or has one of the wrong kind"):
            StreamState.from_json(_resealed(data | {"pending": pending}))


@pytest.mark.parametrize("digest", ["", "xyz", "0" * 15, "0" * 17, "ABCDEF0123456789", "0x00000000000000", " " * 16])
def test_digest_that_is_none(state: StreamState, digest: str) -> None:
    with pytest.raises(StateError, match="lacks a field or has one of the wrong kind"):
        StreamState.from_json(_resealed(state.to_dict() | {"digest": digest}))


@pytest.mark.process
def test_reading_a_state_needs_neither_numpy_nor_numba() -> None:
    code = (
        "import sys; from megaresume.stream.state import StreamState; import megaresume.stream.batches;"
        "sys.exit(bool({'numpy', 'numba', 'torch', 'yaml'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_thousand_sources_and_thousands_of_documents_take_little(stream_of: Callable[..., Stream]) -> None:
    """Packed, at most 64 KB; what comes back is what was there, and it goes on as before."""
    rng = random.Random(1)
    names = [f"corpus-{k:04d}" for k in range(1000)]
    sources = {
        name: {"weight": rng.random()} | ({"max_epochs": 9} if k % 7 == 0 else {}) for k, name in enumerate(names)
    }
    data = {"seq_length": 64, "packing": "best_fit", "sources": sources}
    many = stream_of(data, {name: [rng.randint(1, 90) for _ in range(rng.randint(1, 9))] for name in names})
    tiny = stream_of(
        {"seq_length": 1 << 16, "packing": "knapsack", "sources": {"a": {}, "b": {"weight": 2}}},
        {name: [int(rng.expovariate(1 / 20)) + 1 for _ in range(5000)] for name in ("a", "b")},
    )
    for stream, sample in ((many, 200), (tiny, 3)):
        state = stream.state_at(sample)
        text = state.to_json()
        packed = json.loads(text)
        assert len(text) < 1 << 16 and packed["samples"] == sample and packed["digest"] == state.digest
        assert StreamState.from_json(text) == state == StreamState.from_json(json.dumps(packed, sort_keys=True))
        for damaged in (packed | {"samples": sample + 1}, packed | {"packed": packed["packed"][:-9]}):
            with pytest.raises(StateError, match="damaged"):
                StreamState.from_json(damaged)
        with pytest.raises(StateError, match="lacks a field or has one of the wrong kind"):
            StreamState.from_json(_resealed(packed | {"packed": packed["packed"][:-9]}))
    assert sum(len(b.segments) for b in state.bins) > 3000
