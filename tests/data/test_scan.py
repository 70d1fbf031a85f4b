"""What a fingerprint sees of the tokens, held against the raw bytes of the .bin."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from megaresume.data.python_source import PythonSource
from megaresume.data.sidecar import sidecar_path
from megaresume.data.source import PLACES, WINDOW, Windows
from megaresume.data.split import IndexedSource, range_of, split_part
from megaresume.stream.errors import CorpusError, StateError
from megaresume.stream.source import check_fingerprint
from tests.corpora import simple_corpus

Corpus = Callable[..., Path]


def overwrite(prefix: Path, token: int) -> None:
    """Another token in place, as ``rsync --inplace --times`` leaves them: same size, same inode, same mtime."""
    path = Path(f"{prefix}.bin")
    before = path.stat()
    with open(path, "r+b") as file:
        file.seek(token * 4)
        file.write((7).to_bytes(4, "little"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (before.st_size, before.st_ino, before.st_mtime_ns) == (after.st_size, after.st_ino, after.st_mtime_ns)


def prints(lengths: list[int] | np.ndarray[Any, Any]) -> Windows:
    lengths = np.asarray(lengths, np.int64)
    return Windows.choose(len(lengths), lambda ids: lengths[ids])


@pytest.mark.parametrize("dtype", ["int32", "uint16", "int64"])
def test_of_a_small_corpus_every_token_is_hashed(tmp_path, dtype: str) -> None:
    prefix = simple_corpus(tmp_path / "web", [3, 0, 4, 5, 0], dtype)
    raw = np.fromfile(f"{prefix}.bin", dtype)
    expected = xxhash.xxh3_64_hexdigest(raw.astype("<i8").tobytes())
    assert IndexedSource(prefix).fingerprint().contents == expected


def test_the_hash_of_a_larger_corpus_is_what_it_was(tmp_path) -> None:
    """Whoever changes where the windows lie makes every state of a large corpus useless."""
    prefix = simple_corpus(tmp_path / "web", [i % 9 + (2000 if i % 50 == 0 else 0) for i in range(2345)])
    assert IndexedSource(prefix).fingerprint().contents == "4d76b26bafc23907"
    few = simple_corpus(tmp_path / "few", [150_000, 3, 0, 2500])
    assert IndexedSource(few).fingerprint().contents == "1f5f772d4bf42201"


@pytest.mark.parametrize("token", [0, 6, 11])
def test_a_token_that_was_changed_in_place_is_seen_past_the_cache(tmp_path, token: int) -> None:
    prefix = simple_corpus(tmp_path / "web", [3, 4, 5])
    before = IndexedSource(prefix).fingerprint()
    assert IndexedSource(prefix).fingerprint() == before
    overwrite(prefix, token)
    now = IndexedSource(prefix).fingerprint()
    assert now.contents != before.contents and now.lengths == before.lengths
    with pytest.raises(StateError, match="'web' is not the corpus that the state was made with") as error:
        check_fingerprint("web", before, now)
    assert error.value.found == f'web.contents "{now.contents}"'
    assert "documents of the same lengths have other contents" in str(error.value.cause)
    # The entry of the other bytes is gone.
    kept = json.loads(sidecar_path(prefix).read_text())["fingerprints"]
    assert [entry["contents"] for entry in kept] == [now.contents]


def test_a_copy_is_the_same_corpus(tmp_path) -> None:
    prefix = simple_corpus(tmp_path / "web", [3, 4, 5])
    copy = tmp_path / "elsewhere"
    for end in (".bin", ".idx"):
        shutil.copy(f"{prefix}{end}", f"{copy}{end}")
    assert IndexedSource(copy).fingerprint() == IndexedSource(prefix).fingerprint()


def test_files_that_change_while_a_corpus_is_open(tmp_path) -> None:
    prefix = simple_corpus(tmp_path / "web", [3, 4, 5])
    source = IndexedSource(prefix)
    packed = pickle.dumps(source)
    os.utime(f"{prefix}.bin")
    os.chmod(f"{prefix}.idx", 0o600)
    os.link(f"{prefix}.bin", tmp_path / "snapshot")
    assert pickle.loads(packed).get(1).tolist() == source.get(1).tolist()
    shutil.copy(f"{prefix}.bin", tmp_path / "other")
    os.replace(tmp_path / "other", f"{prefix}.bin")
    with pytest.raises(CorpusError, match=r"web.bin changed after the corpus was opened"):
        source.fingerprint()
    with pytest.raises(CorpusError, match=r"web.bin changed after the corpus was opened"):
        pickle.loads(packed)
    # Already mapped: what is read is still the old file. A process that maps it now would read the new one.
    assert source.get(1).tolist() == [10, 11, 12, 13]
    late = IndexedSource(prefix)
    shutil.copy(f"{prefix}.bin", tmp_path / "other")
    os.replace(tmp_path / "other", f"{prefix}.bin")
    with pytest.raises(CorpusError, match=r"web.bin changed after the corpus was opened"):
        _ = late.token_view


@pytest.mark.parametrize("documents", [5, 999, 1000, 1001, 3000])
def test_the_first_documents_of_a_corpus_that_grew(tmp_path, documents: int) -> None:
    lengths = [(7 * i) % 11 for i in range(documents + 500)]
    small = IndexedSource(simple_corpus(tmp_path / "small", lengths[:documents]))
    large = IndexedSource(simple_corpus(tmp_path / "large", lengths))
    assert large.fingerprint(first=documents) == small.fingerprint()
    assert large.fingerprint() != small.fingerprint() != large.fingerprint(first=documents - 1)
    train = split_part(small, "98,1,1", "train")
    assert large.fingerprint(first=len(train)) == train.fingerprint()
    assert range_of(large, 2, documents + 2).fingerprint(first=3) == range_of(small, 2, 5).fingerprint()


def test_windows_are_spread_over_the_whole_corpus() -> None:
    windows = prints([10] * 54_321)
    bounds = [k * 54_321 // PLACES for k in range(PLACES + 1)]
    assert all(a <= i < b for i, (a, b) in zip(windows.documents.tolist(), pairwise(bounds), strict=True))
    assert windows.offsets.tolist() == [0] * PLACES and windows.counts.tolist() == [10] * PLACES
    # Not the same place of each range.
    assert len({i - a for i, a in zip(windows.documents.tolist(), bounds[:-1], strict=True)}) > 40
    # Another number of documents, other places.
    other = prints([10] * 54_322).documents
    assert np.count_nonzero(other == windows.documents) < 100


@pytest.mark.parametrize("lengths", [[10_000_000], [5_000_000, 3, 0, 2_000_000], [10**9] * 300, [9] * 999 + [70_000]])
def test_windows_in_long_documents(lengths: list[int]) -> None:
    windows = prints(lengths)
    assert len(windows.documents) <= PLACES
    assert windows.counts.max() <= max(WINDOW, 3) and windows.counts.min() >= 1
    ends = windows.offsets + windows.counts
    assert (windows.offsets >= 0).all() and (ends <= np.array(lengths)[windows.documents]).all()
    for i in set(windows.documents.tolist()):
        mine = windows.documents == i
        assert (windows.offsets[mine][1:] >= ends[mine][:-1]).all()
    longest = windows.documents == int(np.argmax(lengths))
    assert longest.sum() == max(PLACES // len(lengths), 1)


def test_no_documents_and_only_empty_ones(tmp_path) -> None:
    nothing = xxhash.xxh3_64_hexdigest(b"")
    for lengths in ([], [0], [0] * 2000):
        source = IndexedSource(simple_corpus(tmp_path / f"c{len(lengths)}", lengths))
        assert source.fingerprint().contents == nothing


class Object:
    """A source of one's own."""

    def __init__(self, documents: int, salt: int = 0) -> None:
        self.documents, self.salt, self.asked = documents, salt, 0

    def __len__(self) -> int:
        return self.documents

    def length(self, i: int) -> int:
        return i % 7

    def get(self, i: int) -> Any:
        self.asked += 1
        return np.arange(i % 7) + self.salt


def test_an_object_is_asked_for_a_hundred_documents() -> None:
    things = [Object(5000), Object(5000), Object(5000, salt=1), Object(6000)]
    plain, again, salted, longer = (PythonSource(thing) for thing in things)
    assert plain.fingerprint() == again.fingerprint() == longer.fingerprint(first=5000)
    assert salted.fingerprint().contents != plain.fingerprint().contents
    assert salted.fingerprint().lengths == plain.fingerprint().lengths
    assert 0 < things[1].asked <= 100


def test_an_object_that_says_what_it_is_is_not_read() -> None:
    known = PythonSource(Object(50)).fingerprint()
    thing = Object(50)
    thing.fingerprint = lambda: {"documents": 50, "tokens": known.tokens, "lengths": known.lengths}  # type: ignore[attr-defined]
    source = PythonSource(thing)
    assert source.fingerprint(recompute=True).contents is source.fingerprint(first=20).contents is None
    assert thing.asked == 0
    with pytest.raises(StateError, match="is not the corpus") as error:
        check_fingerprint("mine", known, source.fingerprint())
    assert "the contents are not known any more" in str(error.value.cause)
