from __future__ import annotations

import pickle
import struct
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.data.layout import DTYPES
from megaresume.data.split import IndexedSource
from megaresume.stream.errors import CorpusError
from tests.corpora import simple_corpus, write_corpus

DTYPE_NAMES = [d.name for d in DTYPES.values()]

documents_strategy = st.lists(st.lists(st.lists(st.integers(0, 127), max_size=6), max_size=4), max_size=12)


def rewrite(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(bytes(content))


@settings(max_examples=60, deadline=None)
@given(documents=documents_strategy, dtype=st.sampled_from(DTYPE_NAMES), with_modes=st.booleans())
def test_every_dtype_and_shape_of_document_reads_back(documents, dtype, with_modes):
    with tempfile.TemporaryDirectory() as directory:
        modes = [i % 3 for i in range(sum(map(len, documents)))] if with_modes else None
        source = IndexedSource(write_corpus(Path(directory, "c"), documents, dtype, modes))
        flat = [[t for sequence in document for t in sequence] for document in documents]
        assert len(source) == len(documents)
        assert source.num_tokens == sum(map(len, flat))
        ids = np.arange(len(documents))[::-1].copy()
        assert source.lengths(ids).tolist() == [len(flat[i]) for i in ids]
        starts = source.token_starts(ids)
        for i, tokens in enumerate(flat):
            assert source.get(i).tolist() == tokens
            assert source.get(i).dtype == np.dtype(dtype)
            assert source.length(i) == len(tokens)
            start = starts[len(flat) - 1 - i]
            assert source.token_view[start : start + len(tokens)].tolist() == tokens
            assert (
                source.read(i, len(tokens) // 2, len(tokens) - len(tokens) // 2).tolist() == tokens[len(tokens) // 2 :]
            )
        lengths = np.array([len(tokens) for tokens in flat], "<i8")
        fingerprint = source.fingerprint()
        assert (fingerprint.documents, fingerprint.tokens) == (len(flat), lengths.sum())
        assert fingerprint.lengths == xxhash.xxh3_128_hexdigest(lengths.tobytes())
        assert fingerprint.tokenizer is None


@pytest.mark.parametrize("odd", [None, 0, 511, 512, 1023, 1300])
def test_lengths_asked_for_again_and_again(tmp_path, odd):
    """Blocks of documents of one sequence each are remembered; one with a document of two, or of none, is not."""
    documents = [[[1] * (d % 7)] for d in range(1301)]
    if odd is not None:
        documents[odd] = [[1, 2], [3]] if odd % 2 else []
    source = IndexedSource(write_corpus(tmp_path / "c", documents))
    ids = np.random.default_rng(0).permutation(1301)
    for _ in range(4):
        assert source.lengths(ids).tolist() == [sum(map(len, documents[d])) for d in ids.tolist()]
        for outside in (-1, 1301):
            with pytest.raises(IndexError):
                source.lengths(np.array([5, outside]))


@pytest.mark.parametrize("boundary", [3, 512, 600])
def test_a_damaged_boundary_is_seen_though_others_are_remembered(tmp_path, boundary):
    prefix = write_corpus(tmp_path / "c", [[[1] * (d % 7 + 1)] for d in range(1301)])
    at = 34 + 12 * 1301 + 8 * boundary
    rewrite(Path(f"{prefix}.idx"), at, struct.pack("<q", 5000))
    source = IndexedSource(prefix)
    for _ in range(4):
        assert source.lengths(np.arange(700, 1301)).tolist() == [d % 7 + 1 for d in range(700, 1301)]
        for document in (boundary - 1, boundary):
            with pytest.raises(CorpusError):
                source.lengths(np.array([document]))


def test_a_damaged_length_is_seen_though_its_block_is_remembered(tmp_path):
    prefix = write_corpus(tmp_path / "c", [[[1] * (d % 7 + 1)] for d in range(1301)])
    rewrite(Path(f"{prefix}.idx"), 34 + 4 * 600, struct.pack("<i", -5))
    source = IndexedSource(prefix)
    for _ in range(4):
        assert source.lengths(np.arange(601, 1301)).tolist() == [d % 7 + 1 for d in range(601, 1301)]
        with pytest.raises(CorpusError, match="600"):
            source.lengths(np.arange(300, 1301))


def test_corpus_of_megatrons_builder_reads_the_same(tmp_path):
    torch = pytest.importorskip("torch")
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    assert {d.value: d.name for d in indexed.DType} == {code: dtype.name for code, dtype in DTYPES.items()}
    rng = np.random.default_rng(0)
    for dtype in (np.uint16, np.int32, np.int64, np.float32):
        prefix = tmp_path / np.dtype(dtype).name
        builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        documents = []
        for _ in range(20):
            parts = [rng.integers(0, 30000, rng.integers(1, 50)) for _ in range(rng.integers(0, 4))]
            for part in parts:
                builder.add_item(torch.from_numpy(part))
            builder.end_document()
            documents.append(np.concatenate([np.zeros(0, np.int64), *parts]))
        builder.finalize(f"{prefix}.idx")
        source = IndexedSource(prefix)
        assert [source.get(i).tolist() for i in range(len(source))] == [d.tolist() for d in documents]


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_path_with_or_without_suffix_and_with_dots(tmp_path, suffix):
    prefix = simple_corpus(tmp_path / "web.v2.text", [3, 4])
    assert IndexedSource(f"{prefix}{suffix}").lengths(np.array([0, 1])).tolist() == [3, 4]


def test_ids_and_ranges_outside_are_refused(tmp_path):
    source = IndexedSource(simple_corpus(tmp_path / "c", [3, 4]))
    for bad in ([-1], [0, 2], [1 << 40]):
        with pytest.raises(IndexError):
            source.lengths(np.array(bad))
        with pytest.raises(IndexError):
            source.token_starts(np.array(bad))
    for offset, length in ((-1, 1), (0, 4), (3, 1), (0, -1)):
        with pytest.raises(IndexError):
            source.read(0, offset, length)
    with pytest.raises(IndexError):
        source.get(2)


def test_a_worker_does_not_open_the_corpus_that_took_its_place(tmp_path):
    """Of other lengths, it would plan other samples than its parent, under the same numbers."""
    simple_corpus(tmp_path / "web", [3, 1, 2])
    pickled = pickle.dumps(IndexedSource(tmp_path / "web"))
    assert pickle.loads(pickled).lengths(np.arange(3)).tolist() == [3, 1, 2]
    simple_corpus(tmp_path / "new", [1, 2, 3])
    for suffix in (".bin", ".idx"):
        (tmp_path / "new").with_suffix(suffix).replace((tmp_path / "web").with_suffix(suffix))
    with pytest.raises(CorpusError, match="changed after the corpus was opened"):
        pickle.loads(pickled)


def test_views_are_read_only(tmp_path):
    source = IndexedSource(simple_corpus(tmp_path / "c", [3, 4]))
    with pytest.raises(ValueError, match="read-only"):
        source.get(0)[0] = 1


def test_pickled_source_opens_the_corpus_again(tmp_path):
    source = IndexedSource(simple_corpus(tmp_path / "c", [3, 4, 5]))
    copy = pickle.loads(pickle.dumps(source))
    assert copy.get(2).tolist() == source.get(2).tolist()
    assert len(pickle.dumps(source)) < 500


def test_threads_share_a_source(tmp_path):
    source = IndexedSource(simple_corpus(tmp_path / "c", range(1, 200)))
    ids = np.random.default_rng(0).integers(0, 199, 10_000)
    answers: list[bool] = []

    def work() -> None:
        answers.append((source.lengths(ids) == ids + 1).all() and source.get(7).tolist() == list(range(70, 78)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 4


class TestDamage:
    """Every kind of damage that shows at open has its own error."""

    @pytest.fixture
    def prefix(self, tmp_path):
        return simple_corpus(tmp_path / "web_text_document", [3, 4, 5])

    def check(self, prefix: Path, text: str) -> CorpusError:
        with pytest.raises(CorpusError, match=text) as caught:
            IndexedSource(prefix)
        assert caught.value.found is not None
        assert caught.value.expected is not None
        assert caught.value.action is not None
        return caught.value

    @pytest.mark.parametrize("suffix", ["bin", "idx"])
    def test_missing_file(self, prefix, suffix):
        Path(f"{prefix}.{suffix}").unlink()
        self.check(prefix, rf"web_text_document\.{suffix} is missing")

    def test_missing_corpus_names_close_ones(self, prefix):
        error = self.check(prefix.with_name("web_txt_document"), "is missing")
        assert "web_text_document" in str(error)
        assert "no directory" in str(self.check(prefix.parent / "elsewhere" / "web", "is missing"))

    @pytest.mark.parametrize("size", [0, 5, 9, 33])
    def test_truncated_header(self, prefix, size):
        path = Path(f"{prefix}.idx")
        path.write_bytes(path.read_bytes()[:size])
        self.check(prefix, "is truncated")

    @pytest.mark.parametrize("cut", [1, 8, 40])
    def test_truncated_arrays(self, prefix, cut):
        path = Path(f"{prefix}.idx")
        path.write_bytes(path.read_bytes()[:-cut])
        self.check(prefix, "is shorter than its counts say")

    def test_magic(self, prefix):
        Path(f"{prefix}.idx").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
        self.check(prefix, "is not the index of a Megatron corpus")

    def test_version(self, prefix):
        rewrite(Path(f"{prefix}.idx"), 9, struct.pack("<Q", 2))
        self.check(prefix, "unknown version")

    @pytest.mark.parametrize("code", [0, 9, 255])
    def test_dtype_code(self, prefix, code):
        rewrite(Path(f"{prefix}.idx"), 17, bytes([code]))
        self.check(prefix, "unknown code for the type of its tokens")

    def test_other_dtype_does_not_fit_the_bin(self, prefix):
        rewrite(Path(f"{prefix}.idx"), 17, bytes([5]))
        self.check(prefix, "shorter than its index says")

    @pytest.mark.parametrize(("offset", "count"), [(18, 2), (18, 1 << 60), (26, 3), (26, 2**64 - 1)])
    def test_counts(self, prefix, offset, count):
        rewrite(Path(f"{prefix}.idx"), offset, struct.pack("<Q", count))
        self.check(prefix, "counts that do not match its size|shorter than its counts say")

    def test_no_boundaries(self, prefix):
        rewrite(Path(f"{prefix}.idx"), 26, struct.pack("<Q", 0))
        self.check(prefix, "inconsistent counts")

    def test_appended_bytes(self, prefix):
        with open(f"{prefix}.idx", "ab") as file:
            file.write(b"x" * 5)
        self.check(prefix, "counts that do not match its size")

    def test_last_boundary_is_not_the_number_of_sequences(self, prefix):
        rewrite(Path(f"{prefix}.idx"), 34 + 3 * 12 + 3 * 8, struct.pack("<q", 2))
        self.check(prefix, "inconsistent document boundaries")

    def test_first_pointer(self, prefix):
        rewrite(Path(f"{prefix}.idx"), 34 + 3 * 4, struct.pack("<q", 4))
        self.check(prefix, "inconsistent pointers")

    @pytest.mark.parametrize(("change", "text"), [(-1, "shorter"), (4, "longer")])
    def test_bin_of_another_size(self, prefix, change, text):
        path = Path(f"{prefix}.bin")
        path.write_bytes((path.read_bytes() + bytes(8))[: path.stat().st_size + change])
        self.check(prefix, f"is {text} than its index says")

    @pytest.mark.parametrize(
        ("offset", "value"),
        [
            (34 + 4, struct.pack("<i", -1)),  # length of sequence 1
            (34 + 4, struct.pack("<i", 1 << 30)),
            (34 + 12 + 8, struct.pack("<q", 1 << 60)),  # pointer of sequence 1
            (34 + 12 + 8, struct.pack("<q", -4)),
            (34 + 12 + 8, struct.pack("<q", (1 << 63) - 4)),  # the end would leave int64
            (34 + 12 + 8, struct.pack("<q", 13)),
            (34 + 36 + 8, struct.pack("<q", -1)),  # boundary 1
            (34 + 36 + 8, struct.pack("<q", 1 << 60)),
        ],
    )
    def test_damage_in_the_middle_is_found_where_it_is_used(self, prefix, offset, value):
        rewrite(Path(f"{prefix}.idx"), offset, value)
        source = IndexedSource(prefix)  # O(1): cannot see it
        with pytest.raises(CorpusError, match="is damaged at document"):
            source.fingerprint()
        with pytest.raises(CorpusError, match=r"is damaged at document [01]"):
            source.token_starts(np.array([0, 1, 2]))

    @pytest.mark.parametrize(
        ("offset", "value"),
        [
            (34 + 4, struct.pack("<i", -1)),  # length of sequence 1
            (34 + 36 + 8, struct.pack("<q", -1)),  # boundary 1
            (34 + 36 + 8, struct.pack("<q", 1 << 60)),
            (34 + 36 + 8, struct.pack("<q", 3)),
        ],
    )
    def test_damage_in_the_middle_does_not_become_a_length(self, prefix, offset, value):
        rewrite(Path(f"{prefix}.idx"), offset, value)
        with pytest.raises(CorpusError, match=r"is damaged at document [01]"):
            IndexedSource(prefix).lengths(np.array([0, 1, 2]))

    def test_bin_removed_or_cut_after_open(self, prefix):
        source = IndexedSource(prefix)
        Path(f"{prefix}.bin").write_bytes(b"")
        with pytest.raises(CorpusError, match="changed after the corpus was opened"):
            source.get(0)
        Path(f"{prefix}.bin").unlink()
        with pytest.raises(CorpusError, match="changed after the corpus was opened"):
            source.get(0)


def test_open_does_not_scan(tmp_path):
    """A hole of 2 GB in the index: a scan would touch its pages."""
    import resource

    sequences = 100_000_000
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, sequences, sequences + 1)
    with open(tmp_path / "c.idx", "wb") as file:
        file.write(header)
        file.seek(34 + 20 * sequences)
        file.write(struct.pack("<q", sequences))
    (tmp_path / "c.bin").touch()

    def pages() -> int:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_minflt + usage.ru_majflt

    touched = []
    for _ in range(2):  # the first compiles the kernel
        before = pages()
        source = IndexedSource(tmp_path / "c")
        assert len(source) == sequences
        assert source.length(0) == 0
        touched.append(pages() - before)
    assert touched[1] < 1000, touched
