from __future__ import annotations

import numpy as np
import pytest
import xxhash

from megaresume.data.python_source import PythonSource, as_source
from megaresume.stream.errors import ConfigError, CorpusError
from megaresume.stream.state import Fingerprint


class Lines:
    """The least that a source needs."""

    def __init__(self, lines=("one", "three", "")):
        self.lines = lines

    def __len__(self):
        return len(self.lines)

    def length(self, i):
        return len(self.lines[i])

    def get(self, i):
        return np.frombuffer(self.lines[i].encode("ascii"), np.uint8)


class Fast(Lines):
    def lengths(self, ids):
        return np.array([len(self.lines[i]) for i in ids], np.int32)

    def read(self, i, offset, length):
        return self.get(i)[offset : offset + length]

    def fingerprint(self):
        return {"documents": len(self), "tokens": 8, "lengths": "0" * 32, "tokenizer": "t"}


def changed(base=Fast, **methods):
    """An object of `base` with some methods answering otherwise."""
    return type("Changed", (base,), {name: staticmethod(lambda *_, v=value: v) for name, value in methods.items()})()


@pytest.mark.parametrize("cls", [Lines, Fast])
def test_documents_lengths_and_tokens(cls):
    source = as_source(cls())
    assert as_source(source) is source
    assert len(source) == 3
    assert source.length(1) == 5
    lengths = source.lengths(np.array([2, 0, 1]))
    assert (lengths.tolist(), lengths.dtype) == ([0, 3, 5], np.int64)
    assert bytes(source.get(1)) == b"three"
    assert bytes(source.read(1, 1, 3)) == b"hre"
    assert source.get(2).shape == (0,)
    assert source.lengths(np.zeros(0, np.int64)).shape == (0,)


def test_fingerprint_is_computed_or_the_objects_own():
    hashed = xxhash.xxh3_128_hexdigest(np.array([3, 5, 0], "<i8").tobytes())
    letters = np.frombuffer(b"onethree", np.uint8).astype("<i8").tobytes()
    expected = Fingerprint(documents=3, tokens=8, lengths=hashed, contents=xxhash.xxh3_64_hexdigest(letters))
    assert PythonSource(Lines()).fingerprint() == expected
    assert PythonSource(Fast()).fingerprint().lengths == "0" * 32
    assert PythonSource(Fast()).fingerprint(recompute=True).lengths == hashed
    assert PythonSource(changed(fingerprint=expected)).fingerprint() == expected


def test_fingerprint_of_more_than_one_chunk():
    lines = ["x" * (i % 7) for i in range(70_000)]
    hashed = xxhash.xxh3_128_hexdigest(np.array([len(line) for line in lines], "<i8").tobytes())
    assert PythonSource(Lines(lines)).fingerprint().lengths == hashed
    assert PythonSource(Fast(lines)).fingerprint(recompute=True).lengths == hashed


@pytest.mark.parametrize("method", ["__len__", "length", "get"])
def test_missing_method(method):
    methods = {m: getattr(Lines, m) for m in ("__init__", "__len__", "length", "get") if m != method}
    with pytest.raises(ConfigError, match="source 'mine' lacks methods") as caught:
        as_source(type("Half", (), methods)(), "mine")
    assert method in str(caught.value.found)


@pytest.mark.parametrize("answer", [-1, 2.5, "3", None])
def test_bad_length(answer):
    with pytest.raises(CorpusError, match="bad length of document 1"):
        PythonSource(changed(Lines, length=answer)).length(1)
    with pytest.raises(CorpusError, match="bad length of document 1"):
        PythonSource(changed(Lines, length=answer)).lengths(np.array([1]))


@pytest.mark.parametrize("answer", [[1], [1.0, 2.0], [[1, 2]], 3, ["a", "b"]])
def test_bad_lengths(answer):
    with pytest.raises(CorpusError, match=r"lengths\(ids\) answers with the wrong kind"):
        PythonSource(changed(lengths=answer)).lengths(np.array([1, 2]))


def test_negative_lengths():
    with pytest.raises(CorpusError, match="bad length of document 2"):
        PythonSource(changed(lengths=[1, -7])).lengths(np.array([1, 2]))


@pytest.mark.parametrize("answer", [[1, 2], [[1, 2, 3]], [1.0, 2.0, 3.0], None])
@pytest.mark.parametrize("method", ["get", "read"])
def test_tokens_that_do_not_fit(answer, method):
    source = PythonSource(changed(**{method: answer}))
    with pytest.raises(CorpusError, match=rf"{method}\(.*of document 0 does not fit"):
        source.get(0) if method == "get" else source.read(0, 0, 3)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"documents": 4, "tokens": 8, "lengths": "0" * 32},
        {"documents": 3, "tokens": 8, "lengths": "short"},
        {"documents": 3, "tokens": 8, "lengths": "0" * 32, "path": "x"},
        {"documents": 3, "tokens": "8", "lengths": "0" * 32},
        {"documents": 3, "tokens": 8, "lengths": None},
    ],
)
def test_bad_fingerprint(answer):
    with pytest.raises(CorpusError, match=r"fingerprint\(\) answers with something else"):
        PythonSource(changed(fingerprint=answer)).fingerprint()


@pytest.mark.parametrize("cls", [Lines, Fast])
def test_outside(cls):
    source = PythonSource(cls())
    for bad in (-1, 3):
        with pytest.raises(IndexError):
            source.length(bad)
        with pytest.raises(IndexError):
            source.lengths(np.array([0, bad]))
        with pytest.raises(IndexError):
            source.get(bad)
    with pytest.raises(IndexError):
        source.read(0, 2, 2)
