from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaresume.encoding.text.tokenizers import ByteTokenizer, load_tokenizer
from megaresume.stream.errors import CorpusError, SetupError, UsageError


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_bytes_round_trip(texts):
    tokenizer = ByteTokenizer()
    encoded = tokenizer.encode_batch(texts)
    assert [tokens.tolist() for tokens in encoded] == [list(text.encode()) for text in texts]
    assert [tokenizer.decode(np.append(tokens.astype(np.uint16), tokenizer.eod)) for tokens in encoded] == texts


def test_bytes_are_the_default():
    tokenizer = load_tokenizer(None)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == ("bytes", 257, 256)
    assert tokenizer.decode([0xC3]) == "\ufffd"
    # Part of every state: must never change.
    assert tokenizer.fingerprint() == "2be0b91e110bcd0874e3d84170dc700f"


def test_hugging_face_round_trip_without_padding_truncation_and_added_tokens(tokenizer_json):
    tokenizer = load_tokenizer(tokenizer_json)
    texts = ["the quick brown fox", "", "ünïcode 🦊 " * 50]
    encoded = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(tokens) for tokens in encoded] == texts
    assert encoded[1].shape == (0,)
    assert len(encoded[2]) > 8
    assert all(0 not in tokens and 2 not in tokens for tokens in encoded)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == ("tokenizer.json", 291, 1)
    assert tokenizer.decode([*encoded[0], 1]) == texts[0]


def test_directory_of_a_model(tokenizer_json):
    assert load_tokenizer(tokenizer_json.parent).fingerprint() == load_tokenizer(tokenizer_json).fingerprint()


def test_fingerprint_is_of_the_mapping_not_of_the_file(tokenizer_json, tmp_path):
    tokenizer = load_tokenizer(tokenizer_json)
    description = json.loads(tokenizer_json.read_text())
    path = tmp_path / "other.json"
    same = dict(reversed(description.items())) | {"padding": None, "truncation": None}
    path.write_text(json.dumps(same, indent=7))
    assert load_tokenizer(path).fingerprint() == tokenizer.fingerprint()
    merges = description["model"]["merges"]
    path.write_text(json.dumps(description | {"model": description["model"] | {"merges": merges[:-1]}}))
    assert load_tokenizer(path).fingerprint() != tokenizer.fingerprint()
    assert load_tokenizer(tokenizer_json, eod_token="<|pad|>").fingerprint() != tokenizer.fingerprint()


def test_eod_token(tokenizer_json):
    assert load_tokenizer(tokenizer_json, eod_token="<|pad|>").eod == 2
    with pytest.raises(UsageError, match="has no token"):
        load_tokenizer(tokenizer_json, eod_token="<|none|>")
    with pytest.raises(UsageError, match="has its own"):
        load_tokenizer(None, eod_token="</s>")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"vocab": {}}', b'{"model": {"type": "Nonsense"}}', b"\xff\xfe"]
)
def test_not_a_tokenizer(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(path)


def test_missing_tokenizer(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        load_tokenizer(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_missing_library(tokenizer_json, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SetupError, match="'tokenizers' is missing") as caught:
        load_tokenizer(tokenizer_json)
    assert "megaresume[text]" in str(caught.value)


@pytest.mark.parametrize("ids", [[257], [-1]])
def test_tokens_of_another_tokenizer(ids):
    with pytest.raises(CorpusError, match="outside the vocabulary"):
        ByteTokenizer().decode(ids)
