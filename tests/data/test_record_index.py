from __future__ import annotations

import json
import os
import pickle
import shutil
import time

import numpy as np
import pytest

from megaresume.data.record_index import COLUMNS_AT, ShardIndex
from megaresume.data.shard_source import ShardSource
from megaresume.stream.errors import CorpusError, SetupError


def header_place(data: bytes) -> int:
    return ShardIndex.column_places(15)["end"]


def with_byte(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def of_version(data: bytes, change: int) -> bytes:
    return data[:24] + bytes([data[24] + change]) + data[25:]


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda d: b"", "is damaged"),
        (lambda d: d[:100], "is damaged"),
        (lambda d: d[:-1], "is damaged"),
        (lambda d: d[:5000], "is damaged"),
        (lambda d: d + b"\0", "is damaged"),
        (lambda d: b"MMIDIDX\0" + d[8:], "is damaged"),
        (lambda d: with_byte(d, 33), "is damaged"),
        (lambda d: with_byte(d, header_place(d) + 10), "is damaged"),
        (lambda d: of_version(d, 1), "has a version that this release cannot read"),
        (lambda d: of_version(d, -1), "was written by an older megaresume"),
    ],
    ids=[
        "empty",
        "cut early",
        "cut late",
        "cut in the columns",
        "longer",
        "another format",
        "records",
        "header",
        "newer",
        "older",
    ],
)
def test_an_index_that_is_not_what_was_written_is_refused(pairs, damage, match):
    data = pairs.read_bytes()
    assert len(ShardIndex(pairs)) == 15
    pairs.write_bytes(damage(data))
    with pytest.raises(CorpusError, match=match):
        ShardIndex(pairs)


@pytest.mark.parametrize("column", ShardIndex.COLUMNS)
def test_a_damaged_column_is_found_when_everything_is_read(pairs, column):
    ShardIndex(pairs).verify()
    pairs.write_bytes(with_byte(pairs.read_bytes(), ShardIndex.column_places(15)[column] + 17))
    with pytest.raises(CorpusError, match=f"column {column}"):
        ShardSource(pairs).fingerprint(recompute=True)


def test_a_damaged_length_is_found_at_every_start(pairs):
    """A hole that a copy left: a document of length 0 would be passed over, and never read to be compared."""
    assert ShardSource(pairs).lengths(np.arange(15)).min() > 0
    data, at = pairs.read_bytes(), ShardIndex.column_places(15)["tokens"] + 4 * 6
    pairs.write_bytes(data[:at] + bytes(4) + data[at + 4 :])
    assert ShardSource(pairs).lengths(np.arange(15)).tolist().index(0) == 6
    with pytest.raises(CorpusError, match="column tokens"):
        ShardSource(pairs).fingerprint()


def test_missing_or_not_to_be_read(tmp_path, pairs):
    with pytest.raises(CorpusError, match=r"missing[\s\S]*megaresume prepare"):
        ShardIndex(tmp_path / "other.shards.idx")
    with pytest.raises(CorpusError, match="a directory"):
        ShardIndex(tmp_path)
    if os.getuid():
        pairs.chmod(0)
        with pytest.raises(SetupError):
            ShardIndex(pairs)


def test_pickled_it_is_the_same_index_or_an_error(pairs, tmp_path):
    index = ShardIndex(pairs)
    sent = pickle.dumps(index)
    assert len(sent) < 1000
    assert np.array_equal(pickle.loads(sent).column("offset"), index.column("offset"))
    assert not index.column("tokens").flags.writeable
    data = bytearray(pairs.read_bytes())
    place = header_place(data)
    data[place:] = bytes(data[place:]).replace(b'"policy":"error"', b'"policy":"ERROR"')
    data[:128] = ShardIndex.preamble(len(index), bytes(data[place:]))
    os.unlink(pairs)
    pairs.write_bytes(data)
    with pytest.raises(CorpusError, match="changed while it was in use"):
        pickle.loads(sent)


def sparse_index(path, records, header):
    """As `merge_parts` writes it, with columns of zeros that take no room on disk."""
    end = ShardIndex.column_places(records)["end"]
    with open(path, "wb") as file:
        file.truncate(end)
        file.write(ShardIndex.preamble(records, header).ljust(COLUMNS_AT, b"\0"))
        file.seek(end)
        file.write(header)


def test_opening_takes_the_same_time_at_any_size(pairs, tmp_path):
    header = pairs.read_bytes()[header_place(b"") :]
    if shutil.disk_usage(tmp_path).free < 1 << 30:
        pytest.skip("no room")
    seconds = {}
    for records in (10**3, 10**8):
        path = tmp_path / f"{records}.shards.idx"
        fields = json.loads(header)
        fields["files"][0]["records"] += records - sum(file["records"] for file in fields["files"])
        sparse_index(path, records, json.dumps(fields).encode())
        best = 9.0
        for _ in range(5):
            begin = time.perf_counter()
            index = ShardIndex(path)
            assert index.column("nbytes")[records - 1] == 0
            best = min(best, time.perf_counter() - begin)
        seconds[records] = best
    assert seconds[10**8] < 10 * seconds[10**3] + 0.01
