"""A state goes on only with its own config and its own corpora: every field that differs is named."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash

from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import CorpusError, StateError
from megaresume.stream.source import hash_lengths
from megaresume.stream.state import Fingerprint, StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList

DATA: dict[str, Any] = {
    "seed": 3,
    "seq_length": 64,
    "packing": {"mode": "best_fit", "open_bins": 3, "max_age": 9, "align": 4},
    "blend": {"unit": "tokens"},
    "sources": {"web": {"weight": 2}, "code": {"weight": 1, "max_epochs": 40}},
}
LENGTHS = {"web": [3, 40, 7, 0, 12, 64, 90, 1, 33], "code": [130, 5, 64, 20]}

CHANGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "seed": ({"seed": 4}, ["seed 4", "seed 3"]),
    "seq_length": ({"seq_length": 128}, ["seq_length 128", "seq_length 64"]),
    "mode": ({"packing": {"mode": "split", "align": 4}}, ['packing.mode "split"', 'packing.mode "best_fit"']),
    "open_bins": (
        {"packing": DATA["packing"] | {"open_bins": 4}},
        ["packing.open_bins 4", "packing.open_bins 3"],
    ),
    "max_age": ({"packing": DATA["packing"] | {"max_age": 8}}, ["packing.max_age 8", "packing.max_age 9"]),
    "align": ({"packing": DATA["packing"] | {"align": 2}}, ["packing.align 2", "packing.align 4"]),
    "unit": ({"blend": {"unit": "documents"}}, ['blend.unit "documents"', 'blend.unit "tokens"']),
    "weight": (
        {"sources": DATA["sources"] | {"web": {"weight": 3}}},
        ["sources.web.weight 3", "sources.web.weight 2"],
    ),
    "max_epochs": (
        {"sources": DATA["sources"] | {"code": {"max_epochs": 41}}},
        ["sources.code.max_epochs 41", "sources.code.max_epochs 40"],
    ),
    "policy": (
        {"sources": DATA["sources"] | {"code": {"max_epochs": 40, "on_exhausted": "stop"}}},
        ['sources.code.on_exhausted "stop"', 'sources.code.on_exhausted "drop"'],
    ),
    "a source less": ({"sources": {"web": {"weight": 2}}}, ["sources.code.weight 0", "sources.code.weight 1"]),
    "a source more": (
        {"sources": DATA["sources"] | {"books": {}}},
        ["sources.books.weight 1", "sources.books.weight 0"],
    ),
    "two at once": (
        {"blend": {"unit": "documents"}, "seq_length": 128},
        ['seq_length 128, blend.unit "documents"', 'seq_length 64, blend.unit "tokens"'],
    ),
}


@pytest.fixture(scope="module")
def state(stream_of: Callable[..., Stream]) -> StreamState:
    return stream_of(DATA, LENGTHS).state_at(20)


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES.keys())
def test_changed_config(
    stream_of: Callable[..., Stream], state: StreamState, change: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(StateError, match="the data config is not the one that the state was made with") as error:
        stream_of(DATA | change, LENGTHS | {"books": [1]}, state)
    found, expected = words
    assert found in str(error.value.found) and expected in str(error.value.expected)


def test_the_same_blend_spelled_otherwise(stream_of: Callable[..., Stream], state: StreamState) -> None:
    sources = {"web": {"weight": "2/3", "path": "moved/elsewhere"}, "code": {"weight": 1 / 3, "max_epochs": 40}}
    same = DATA | {"sources": {"web": {"weight": 0.2}, "code": {"weight": 0.1, "max_epochs": 40}}}
    assert stream_of(same, LENGTHS, state).start == 20
    with pytest.raises(StateError):  # a third in floating point is no third
        stream_of(DATA | {"sources": sources}, LENGTHS, state)


CORPORA: dict[str, tuple[list[int], str, str]] = {
    "grown": ([*LENGTHS["web"], 5, 5], "grown by 2 documents", "web.documents 11"),
    "shrunk": (LENGTHS["web"][:-1], "lost 1 documents", "web.documents 8"),
    "a length changed": ([4, *LENGTHS["web"][1:]], "prepared again", "web.tokens 251"),
    "two lengths swapped": ([40, 3, *LENGTHS["web"][2:]], "prepared again", "web.lengths"),
}


@pytest.mark.parametrize(("lengths", "cause", "found"), CORPORA.values(), ids=CORPORA.keys())
def test_changed_corpus(
    stream_of: Callable[..., Stream], state: StreamState, lengths: list[int], cause: str, found: str
) -> None:
    with pytest.raises(StateError, match="source 'web' is not the corpus that the state was made with") as error:
        stream_of(DATA, LENGTHS | {"web": lengths}, state)
    assert cause in str(error.value.cause) and found in str(error.value.found)


def test_swapped_corpora(stream_of: Callable[..., Stream], state: StreamState) -> None:
    with pytest.raises(StateError, match="source 'web' is not the corpus"):
        stream_of(DATA, {"web": LENGTHS["code"], "code": LENGTHS["web"]}, state)


class _Tokenized(LengthList):
    """A source that knows its tokenizer; its fingerprint is a plain mapping."""

    def __init__(self, lengths: list[int], tokenizer: str | None, documents: int | None = None) -> None:
        super().__init__(lengths)
        self.tokenizer, self.documents = tokenizer, documents

    def fingerprint(self) -> Any:
        whole = hash_lengths(self)
        documents = whole.documents if self.documents is None else self.documents
        return {"documents": documents, "tokens": whole.tokens, "lengths": whole.lengths, "tokenizer": self.tokenizer}


def test_another_tokenizer() -> None:
    config = StreamConfig.from_dict({"seq_length": 8, "sources": {"a": {}}})
    state = Stream(config, [_Tokenized([5, 6], "gpt2")]).state_at(3)
    assert Stream(config, [_Tokenized([5, 6], "gpt2")], state=state).start == 3
    with pytest.raises(StateError, match="source 'a' is not the corpus") as error:
        Stream(config, [_Tokenized([5, 6], "llama")], state=state)
    assert error.value.found == 'a.tokenizer "llama"' and error.value.expected == 'a.tokenizer "gpt2"'
    assert "another tokenizer" in str(error.value.cause)


def test_a_tokenizer_that_is_not_known_any_more() -> None:
    """A deleted sidecar is no other tokenizer, and must not be called one."""
    config = StreamConfig.from_dict({"seq_length": 8, "sources": {"a": {}}})
    state = Stream(config, [_Tokenized([5, 6], "gpt2")]).state_at(3)
    with pytest.raises(StateError, match="source 'a' is not the corpus") as error:
        Stream(config, [_Tokenized([5, 6], None)], state=state)
    assert "no longer known" in str(error.value.cause) and "PREFIX.megaresume.json" in str(error.value.action)
    unknown = Stream(config, [_Tokenized([5, 6], None)]).state_at(3)
    with pytest.raises(StateError, match="source 'a' is not the corpus") as error:
        Stream(config, [_Tokenized([5, 6], "gpt2")], state=unknown)
    assert "was not known when the state was made" in str(error.value.cause)


def test_a_fingerprint_of_another_corpus() -> None:
    config = StreamConfig.from_dict({"seq_length": 8, "sources": {"a": {}}})
    with pytest.raises(CorpusError, match="source 'a' contradicts its fingerprint") as error:
        Stream(config, [_Tokenized([5, 6], None, documents=3)]).state_at(0)
    assert "2 documents" in str(error.value.found) and "3 documents" in str(error.value.expected)


def test_no_fingerprint_in_the_state(stream_of: Callable[..., Stream], state: StreamState) -> None:
    with pytest.raises(StateError, match="source 'web' is not the corpus") as error:
        stream_of(DATA, LENGTHS, state.replace(fingerprints={"code": state.fingerprints["code"]}))
    assert "the source is new" in str(error.value.cause)


def test_the_hash_is_xxh3_over_little_endian_int64() -> None:
    lengths = [3, 0, 2**31 - 1, 77]
    expected = xxhash.xxh3_128_hexdigest(struct.pack("<4q", *lengths))
    found = hash_lengths(LengthList(lengths))
    assert found == Fingerprint(documents=4, tokens=sum(lengths), lengths=expected)


def test_the_hash_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    source = LengthList(np.arange(1000).tolist())
    whole = hash_lengths(source)
    monkeypatch.setattr("megaresume.stream.source.SCAN", 7)
    assert hash_lengths(source) == whole
