from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megaresume.data.held_out import extent_of
from megaresume.data.python_source import PythonSource
from megaresume.data.source import TokenSource
from megaresume.data.split import IndexedSource, range_of, split_part, split_ranges
from megaresume.stream.errors import ConfigError
from tests.corpora import simple_corpus

SHARES = st.one_of(
    st.integers(0, 1000).map(str),
    st.floats(0, 1000, allow_nan=False).map(lambda x: f"{x:.6f}"),
    st.just(".5"),
    st.just("3."),
)


def megatron_ranges(split: str, documents: int) -> list[tuple[int, int] | None]:
    """As `BlendedMegatronDatasetBuilder._build_megatron_dataset_splits` does it, by Megatron's own functions."""
    config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
    matrix = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))

    def bounds(m):
        return (round(m[0] * float(documents)), round(m[1] * float(documents)))

    return [None if m is None else bounds(m) for m in matrix]


@settings(max_examples=400, deadline=None)
@given(
    shares=st.lists(SHARES, min_size=1, max_size=3), documents=st.one_of(st.integers(0, 2000), st.integers(0, 10**12))
)
@example(shares=["969", "30", "1"], documents=1_000_003)
@example(shares=["1", "1", "1"], documents=10)
@example(shares=["0.1", "0.2", "0.7"], documents=5)
@example(shares=["99", "1"], documents=50)
def test_same_ranges_as_megatron(shares, documents):
    assume(any(float(s) > 0 for s in shares))
    split = ",".join(shares)
    assert list(split_ranges(split, documents).values()) == megatron_ranges(split, documents)


@settings(max_examples=200, deadline=None)
@given(shares=st.lists(SHARES, min_size=1, max_size=3), documents=st.integers(1, 400))
@example(shares=["969", "30", "1"], documents=20)
def test_no_document_is_in_two_parts(shares, documents):
    """By what the opened parts say of themselves, and by what they read."""
    assume(any(float(s) > 0 for s in shares))

    class Numbers:
        def __len__(self):
            return documents

        def length(self, i):
            return 1

        def get(self, i):
            return np.array([i])

    source = PythonSource(Numbers())
    seen: list[int] = []
    extents = []
    for found in split_ranges(",".join(shares), documents).values():
        if found is not None and found[0] < found[1]:
            part = range_of(source, *found)
            seen += [int(part.get(i)[0]) for i in range(len(part))]
            extents.append(extent_of(part))
    assert seen == list(range(documents))
    assert not any(a.shares(b) for k, a in enumerate(extents) for b in extents[k + 1 :])


@pytest.mark.parametrize("split", ["969,30,1", "969, 30, 1", "969/30/1", " 969 30 1 "])
def test_separators(split):
    assert list(split_ranges(split, 1000).values()) == [(0, 969), (969, 999), (999, 1000)]
    assert list(split_ranges(split, 1000).values()) == megatron_ranges(split, 1000)


@pytest.mark.parametrize("split", ["", "a", "0,0,0", "-5,1", "1,2,3,4", "1.2.3", "1e3,1", "1,,2", "nan", "."])
def test_bad_split_is_refused(split):
    with pytest.raises(ConfigError, match="bad split"):
        split_ranges(split, 100)


def test_part_is_a_zero_copy_view(tmp_path):
    source = IndexedSource(simple_corpus(tmp_path / "c", range(1, 101)))
    valid = split_part(source, "80,15,5", "valid")
    assert isinstance(valid, TokenSource)
    assert len(valid) == 15
    ids = np.array([14, 0, 3])
    assert valid.lengths(ids).tolist() == [95, 81, 84]
    assert valid.length(2) == 83
    assert valid.get(1).tolist() == source.get(81).tolist()
    assert valid.read(1, 5, 2).tolist() == source.read(81, 5, 2).tolist()
    assert np.shares_memory(valid.token_view, source.token_view)
    assert valid.token_starts(ids).tolist() == source.token_starts(ids + 80).tolist()
    for bad in (-1, 15):
        with pytest.raises(IndexError):
            valid.length(bad)
        with pytest.raises(IndexError):
            valid.lengths(np.array([bad]))
        with pytest.raises(IndexError):
            valid.token_starts(np.array([bad]))


def test_documents_appended_behind_a_range_do_not_change_its_fingerprint(tmp_path):
    small = IndexedSource(simple_corpus(tmp_path / "small", range(1, 11)))
    large = IndexedSource(simple_corpus(tmp_path / "large", range(1, 21)))
    assert range_of(small, 2, 9).fingerprint() == range_of(large, 2, 9).fingerprint()
    assert range_of(small, 2, 9).fingerprint() != range_of(large, 2, 10).fingerprint()


def test_range_of_a_python_object_has_the_same_fingerprint(tmp_path):
    source = IndexedSource(simple_corpus(tmp_path / "c", range(1, 101)))

    class Thing:
        def __len__(self):
            return 100

        def length(self, i):
            return i + 1

        def get(self, i):
            return (10 * i + np.arange(i + 1)) % 100

    part = split_part(PythonSource(Thing()), "80,15,5", "test")
    assert not isinstance(part, TokenSource)
    assert part.fingerprint() == split_part(source, "80,15,5", "test").fingerprint()
    whole = range_of(PythonSource(Thing()), 0, 100)
    assert whole.fingerprint() == source.fingerprint()


@pytest.mark.parametrize(
    ("split", "documents", "part"), [("98,1,1", 20, "valid"), ("1,0,1", 20, "valid"), ("1", 20, "test")]
)
def test_empty_part_is_refused(tmp_path, split, documents, part):
    source = IndexedSource(simple_corpus(tmp_path / "c", [1] * documents))
    with pytest.raises(ConfigError, match=f"the {part} part of a source is empty"):
        split_part(source, split, part)


def test_range_outside_is_refused(tmp_path):
    source = IndexedSource(simple_corpus(tmp_path / "c", [1, 2]))
    for start, stop in ((-1, 1), (0, 3), (2, 1)):
        with pytest.raises(ConfigError, match="is outside"):
            range_of(source, start, stop)
