"""Spans of trained tokens: read, checked, part of the fingerprint, and the loss mask of every batch."""

from __future__ import annotations

import io
import pickle
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.batches.assemble import Assembler
from megaresume.batches.batch import BatchArrays
from megaresume.batches.loader import StreamDataset
from megaresume.batches.open import open_stream
from megaresume.data.sidecar import read_tokenizer, sidecar_path, write_tokenizer
from megaresume.data.spans import SpansWriter, spans_of, spans_path
from megaresume.data.split import IndexedSource, range_of
from megaresume.encoding.text.conversation_encoder import runs_of
from megaresume.stream.errors import CorpusError, StateError, UsageError
from tests.corpora import simple_corpus, write_spans

LENGTHS = [7, 0, 12, 30, 1, 9]
SPANS = [[(2, 5), (6, 7)], [], [(0, 12)], [(3, 4), (9, 20), (28, 30)], [], [(1, 9)]]


@pytest.fixture
def prefix(tmp_path):
    prefix = simple_corpus(tmp_path / "chat", LENGTHS)
    write_spans(prefix, LENGTHS, SPANS)
    return prefix


def trained(spans: list[tuple[int, int]], token: int) -> bool:
    return any(first <= token < stop for first, stop in spans)


def masks(source: IndexedSource) -> list[list[bool]]:
    found = spans_of(source, np.arange(len(source)))
    return [found.mask(k, 0, source.length(k)).tolist() for k in range(len(source))]


def test_spans_are_read_in_any_order_and_through_a_range(prefix):
    source = IndexedSource(prefix)
    assert masks(source) == [[trained(s, i) for i in range(n)] for s, n in zip(SPANS, LENGTHS, strict=True)]
    found = spans_of(source, np.array([3, 0, 3]))
    assert found.starts.tolist() == [0, 3, 5, 8] and found.spans.tolist()[3:5] == [[2, 5], [6, 7]]
    assert found.count(np.array([0, 3, 10]), np.array([30, 3, 15])).tolist() == [14, 2, 10]
    part = range_of(range_of(source, 1, 6), 1, 4)
    assert spans_of(part, np.array([0, 2])).spans.tolist() == [[0, 12]]
    assert spans_of(pickle.loads(pickle.dumps(source)), np.array([5])).spans.tolist() == [[1, 9]]
    with pytest.raises(IndexError):
        source.trained_spans(np.array([6]))


@given(st.lists(st.lists(st.booleans(), max_size=40), min_size=1, max_size=12), st.data())
def test_the_writer_writes_what_the_format_says(documents, data):
    lengths = [len(mask) for mask in documents]
    spans = [runs_of(np.array(mask, bool)) for mask in documents]
    assert all(trained(s, i) == m[i] for s, m in zip(spans, documents, strict=True) for i in range(len(m)))
    cut = data.draw(st.integers(0, len(documents)))
    file = io.BytesIO()
    writer = SpansWriter(file, documents=len(documents), spans=sum(map(len, spans)))
    for part in (spans[:cut], spans[cut:]):
        flat = [span for document in part for span in document]
        writer.add(np.array([len(s) for s in part], np.int32), np.array(flat, np.int32).reshape(-1, 2))
    writer.finish(sum(lengths))
    flat = [number for document in spans for span in document for number in span]
    bounds = np.cumsum([0, *(len(document) for document in spans)]).tolist()
    body = struct.pack(f"<{len(bounds)}q", *bounds) + struct.pack(f"<{len(flat)}i", *flat)
    numbers = (1, len(spans), len(flat) // 2, sum(lengths), sum(map(sum, documents)), xxhash.xxh3_64_intdigest(body))
    assert file.getvalue() == b"MGRSPANS" + struct.pack("<6Q", *numbers) + body


@pytest.mark.parametrize("packing", ["best_fit", "split", "none"])
def test_the_loss_mask_of_every_batch(tmp_path, packing):
    """Token by token, from the spans themselves; a corpus without them in the same blend stays as it was."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 60, 80).tolist()
    spans = [runs_of(rng.random(n) < 0.4) for n in lengths]
    write_spans(simple_corpus(tmp_path / "chat", lengths), lengths, spans)
    simple_corpus(tmp_path / "web", lengths)
    sources = {"chat": str(tmp_path / "chat"), "web": str(tmp_path / "web")}
    stream = open_stream({"seed": 5, "seq_length": 32, "packing": {"mode": packing}, "sources": sources})
    assembler = Assembler(stream.sources, seq_length=32, names=["chat", "web"])
    arrays = BatchArrays.empty(150, 32)
    assembler.fill(stream.plan(2, 152), arrays)
    counted = 0
    for row, segments in enumerate(stream.plan(2, 152)):
        expected = []
        for s in segments:
            for i in range(s.offset + 1, s.offset + s.length + 1):
                counts = i < lengths[s.document] and (s.source == 1 or trained(spans[s.document], i))
                expected.append(float(counts))
                counted += counts and s.source == 0
        assert arrays.loss_mask[row].tolist() == expected + [0.0] * (32 - len(expected))
    assert counted > 100


def test_the_fingerprint_covers_every_span_and_grows_with_the_corpus(tmp_path, prefix):
    whole = IndexedSource(prefix).fingerprint()
    assert whole == IndexedSource(prefix).fingerprint() == IndexedSource(prefix).fingerprint(recompute=True)
    plain = IndexedSource(simple_corpus(tmp_path / "plain", LENGTHS)).fingerprint()
    assert plain.trained is None and whole.trained is not None
    assert (plain.lengths, plain.contents) == (whole.lengths, whole.contents)
    longer = simple_corpus(tmp_path / "longer", [*LENGTHS, 8, 8])
    write_spans(longer, [*LENGTHS, 8, 8], [*SPANS, [(0, 1)], []])
    grown = IndexedSource(longer)
    assert grown.fingerprint(first=6) == whole != grown.fingerprint()
    assert range_of(grown, 3, 6).fingerprint() == range_of(IndexedSource(prefix), 3, 6).fingerprint()
    alone = simple_corpus(tmp_path / "alone", LENGTHS[3:])
    write_spans(alone, LENGTHS[3:], SPANS[3:])
    assert range_of(grown, 3, 6).fingerprint().trained == IndexedSource(alone).fingerprint().trained
    write_spans(prefix, LENGTHS, [*SPANS[:5], [(2, 9)]])  # one token less
    assert IndexedSource(prefix).fingerprint().trained not in (None, whole.trained)


def test_a_resume_with_other_spans_or_none_is_refused(prefix):
    data = {"seq_length": 32, "sources": {"chat": str(prefix)}}
    stream = open_stream(data)
    stream.plan(0, 3)
    state = stream.state_at(3)
    assert open_stream(data, state=type(state).from_json(state.to_json())).start == 3
    write_spans(prefix, LENGTHS, [*SPANS[:5], [(2, 9)]])
    with pytest.raises(StateError, match="not the corpus") as found:
        open_stream(data, state=state)
    assert "chat.trained" in str(found.value) and "others of them are trained" in str(found.value)
    spans_path(prefix).unlink()
    with pytest.raises(StateError, match=r"PREFIX\.spans was deleted"):
        open_stream(data, state=state)


def test_spans_that_were_lost_on_a_copy_are_missed(prefix):
    sizes = {"idx_bytes": Path(f"{prefix}.idx").stat().st_size, "bin_bytes": Path(f"{prefix}.bin").stat().st_size}
    path = spans_path(prefix)
    write_tokenizer(prefix, {"fingerprint": "0" * 32}, **sizes, spans_bytes=path.stat().st_size)
    assert read_tokenizer(prefix, **sizes)["spans_bytes"] == path.stat().st_size
    IndexedSource(prefix).fingerprint()
    path.unlink()
    with pytest.raises(CorpusError, match="is missing") as found:
        IndexedSource(prefix)
    assert "every token of it would be trained" in str(found.value)
    sidecar_path(prefix).unlink()
    assert IndexedSource(prefix).trained_spans(np.array([0])) is None


def test_spans_of_another_corpus_or_damaged_ones_are_refused(prefix, tmp_path):
    path = spans_path(prefix)
    good = path.read_bytes()
    write_spans(prefix, [*LENGTHS[:-1], 8], [*SPANS[:-1], [(1, 8)]])
    with pytest.raises(CorpusError, match="of another corpus"):
        IndexedSource(prefix)
    for content, what in (
        (b"", "damaged"),
        (good[:40], "damaged"),
        (good[:-1], "damaged"),
        (b"X" + good[1:], "damaged"),
        (good[:8] + b"\2" + good[9:], "unknown version"),
        (good[:56] + b"\1" + good[57:], "damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=what):
            IndexedSource(prefix)
    for at in range(64, len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CorpusError, match="damaged"):
            IndexedSource(prefix).fingerprint()


def test_a_loop_without_a_loss_mask_is_refused(tmp_path):
    from tests.corpora import simple_corpus

    prefix = simple_corpus(tmp_path / "c", [30])
    write_spans(prefix, [30], [[(3, 9)]])
    stream = open_stream({"seq_length": 32, "sources": {"c": str(prefix)}})
    assert StreamDataset(stream)[0]["loss_mask"].sum() == 6
    with pytest.raises(UsageError, match=r"which tokens are trained[\s\S]*'c'"):
        StreamDataset(stream, fields=("labels",))[0]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(-2, 32), st.integers(-2, 32)), min_size=1, max_size=3))
def test_whatever_the_spans_say_nothing_is_written_outside(tmp_path_factory, spans):
    """A wrong file with a right hash: the check names the document, or the spans are in order and within it."""
    from tests.corpora import simple_corpus

    prefix = simple_corpus(tmp_path_factory.mktemp("c") / "c", [30])
    write_spans(prefix, [30], [spans])
    halves = [(a, b) for a, b in spans if a == b]  # at most one: where the second half of a pair begins
    inside = len(halves) <= 1 and all(0 < a < 30 for a, _ in halves) and all(0 <= a <= b <= 30 for a, b in spans)
    good = inside and all(
        b < a or (b == a and {one, two} & {*halves}) for one, two in pairwise(spans) for b, a in [(one[1], two[0])]
    )
    source = IndexedSource(prefix)
    if good:
        assert source.fingerprint().trained
    else:
        with pytest.raises(CorpusError, match="document 0"):
            source.fingerprint()
    assembler = Assembler([source], seq_length=32)
    stream = open_stream({"seq_length": 32, "sources": {"c": str(prefix)}})
    arrays = BatchArrays.empty(1, 32)
    try:
        plan = stream.plan(0, 1)
    except CorpusError:
        return
    try:
        assembler.fill(plan, arrays, pairs=[])
    except CorpusError:
        assert halves or not good  # a pair that packing cut
        return
    assert set(arrays.loss_mask.ravel().tolist()) <= {0.0, 1.0}
