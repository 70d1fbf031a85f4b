from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaresume.checkpoint.records.sealed import SealError, seal, unseal

FIELDS = {"format": "x", "version": 1, "text": 'quote " and ünïcode', "list": [1, [2, {"a": None}]], "empty": {}}

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text().filter(lambda key: key != "checksum"), plain, min_size=1), st.integers(0, 4))
def test_round_trip(fields: dict[str, object], depth: int) -> None:
    data = seal(fields, depth=depth)
    opened = unseal(data)
    assert opened == json.loads(data)
    del opened["checksum"]
    assert opened == fields


def test_one_line_holds_no_newline_but_its_last() -> None:
    data = seal(FIELDS)
    assert data.count(b"\n") == 1
    assert data.endswith(b"}\n")


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_every_cut_is_refused(depth: int) -> None:
    data = seal(FIELDS, depth=depth)
    whole = len(data.rstrip())
    for length in range(whole):
        with pytest.raises(SealError):
            unseal(data[:length])
    assert unseal(data[:whole])["version"] == 1


@pytest.mark.parametrize("depth", [0, 3])
def test_every_flipped_bit_is_refused_or_harmless(depth: int) -> None:
    data = seal(FIELDS, depth=depth)
    original = unseal(data)
    refused = 0
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert unseal(bytes(flipped)) == original
        except SealError:
            refused += 1
    # Only white space in the seal itself may change without meaning.
    assert refused > len(data) * 8 - 40


@pytest.mark.parametrize("size", [0, 1, 7, 100, 5000])
def test_noise_is_refused(size: int) -> None:
    generator = random.Random(size)
    for _ in range(50):
        with pytest.raises(SealError):
            unseal(generator.randbytes(size))


def test_reasons_are_told_apart() -> None:
    data = seal(FIELDS)
    with pytest.raises(SealError, match="is empty"):
        unseal(b"")
    with pytest.raises(SealError, match="cut short after 20 bytes"):
        unseal(data[:20])
    with pytest.raises(SealError, match="is damaged: its content has checksum"):
        unseal(data.replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(SealError, match="has no checksum"):
        unseal(b'{"format": "x"}')
    with pytest.raises(SealError, match="has no checksum") as caught:
        unseal(data.replace(b'"checksum"', b'#checksum"'))
    assert not caught.value.cut


def test_deep_nesting_is_refused_not_a_crash() -> None:
    body = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000
    import xxhash

    data = body + b', "checksum": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}'
    with pytest.raises(SealError, match="is not JSON"):
        unseal(data)
