"""The pieces of a source: each once an epoch, found from both sides, whatever changes on the way."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megaresume.stream.data_yaml import ShuffleConfig
from megaresume.stream.errors import StateError
from megaresume.stream.order import SourceOrder, resolve
from megaresume.stream.source import STRIDE, LongDocuments, PieceLists, find_long
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList

StreamOf = Callable[..., Stream]

#: epoch, document, offset, tokens, position.
Seen = list[tuple[int, int, int, int, int]]


def _draw(order: SourceOrder, lengths: list[int], position: int, num: int, seen: Seen) -> int:
    """Note the next pieces, some of them one by one, some together."""
    while num > 0:
        here = min(num, order.left(position), 1 + position % 5)
        positions = np.arange(position, position + here)
        documents, offsets = order.pieces_at(positions)
        longest = order.piece_length(position)
        for p, document, offset in zip(positions.tolist(), documents.tolist(), offsets.tolist(), strict=True):
            rest = lengths[document] - offset
            seen.append((order.epoch_of(p), document, offset, min(rest, longest) if longest else rest, p))
        position, num = position + here, num - here
    return position


def _check(order: SourceOrder, lengths: list[int], seen: Seen) -> None:
    """Every epoch that is over holds every token of its documents once, and knows where."""
    assert order.epochs(np.array([s[4] for s in seen], np.int64)).tolist() == [s[0] for s in seen]
    for epoch in range(seen[-1][0]):
        mine = [s for s in seen if s[0] == epoch]
        documents = sorted({s[1] for s in mine})
        assert documents == list(range(len(documents)))
        for document in documents:
            parts = sorted((offset, n, position) for _, d, offset, n, position in mine if d == document)
            ends = np.cumsum([n for _, n, _ in parts]).tolist()
            assert [offset for offset, *_ in parts] == [0, *ends[:-1]] and ends[-1] == lengths[document]
            assert order.positions_of(document, epoch) == [position for *_, position in parts]
        assert order.start_of(epoch) == mine[0][4] and order.end_of_epoch(mine[0][4]) == mine[-1][4] + 1


@pytest.mark.parametrize("seed", range(60))
def test_every_token_once_an_epoch_whatever_changes(seed: int) -> None:
    """Other piece lengths, and a corpus that grows, at any position, also several times in an epoch."""
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 3, 5, 9, 17, 40, 100]) for _ in range(90)]
    shuffle = rng.choice([None, ShuffleConfig(block=rng.randint(1, 6), window=rng.randint(1, 3))])
    order = SourceOrder("web", 7, shuffle, PieceLists(LengthList(lengths)))
    documents, piece, position = rng.randint(1, 30), rng.choice([0, 4, 8, 16]), 0
    order = order.revised(0, documents=documents, piece=piece)
    seen: Seen = []
    for _ in range(rng.randint(3, 30)):
        position = _draw(order, lengths, position, rng.randint(0, 40), seen)
        if rng.random() < 0.4:
            piece = rng.choice([4, 5, 8, 16]) if piece else 0
        if rng.random() < 0.5:
            documents = min(documents + rng.randint(0, 5), len(lengths))
        order = order.revised(position, documents=documents, piece=piece, now=rng.random() < 0.6)
        order.check()
    position = _draw(order, lengths, position, order.end_of_epoch(order.end_of_epoch(position)) - position + 1, seen)
    _check(order, lengths, seen)
    last = {s[1] for s in seen if s[0] == seen[-1][0] - 1}
    assert len(last) == documents  # what is new takes part in the next epoch at the latest


def test_an_epoch_ends_with_the_pieces_that_it_began_with() -> None:
    lengths = [10, 3, 25]
    order = SourceOrder("web", 1, None, PieceLists(LengthList(lengths))).revised(0, documents=3, piece=10)
    assert [e.pieces for e in order.eras] == [5]  # 1, 1 and 3 pieces
    shorter = order.revised(0, documents=3, piece=5)
    assert [(e.first, e.piece, e.pieces) for e in shorter.eras] == [(0, 5, 8)]  # nothing was drawn
    shorter = order.revised(2, documents=3, piece=5)
    assert [(e.first, e.epoch, e.piece, e.pieces) for e in shorter.eras] == [(0, 0, 10, 5), (5, 1, 5, 8)]
    # A change that is taken back before it came leaves no trace, and no era that is over ever changes.
    assert shorter.revised(3, documents=3, piece=10).eras == order.eras
    again = shorter.revised(6, documents=3, piece=10)
    assert [(e.first, e.epoch, e.piece) for e in again.eras] == [(0, 0, 10), (5, 1, 5), (13, 2, 10)]


def test_an_order_that_is_not_of_this_corpus() -> None:
    order = SourceOrder("web", 1, None, PieceLists(LengthList([10, 3, 25]))).revised(0, documents=3, piece=10)
    other = SourceOrder("web", 1, None, PieceLists(LengthList([10, 3, 35])), order.eras)
    with pytest.raises(StateError, match="is not made of the pieces") as error:
        other.check()
    assert "6 pieces of 3 documents" in str(error.value.found)


def test_long_documents_are_found_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaresume.stream.source.SCAN", 7)
    lengths = [random.Random(k).randint(0, 50) for k in range(3000)]
    found = find_long(LengthList(lengths), 10)
    assert found.ids.tolist() == [d for d, n in enumerate(lengths) if n > 10]
    later = [(d, offset) for d, n in enumerate(lengths) for offset in range(10, n, 10)]
    # After them the first pieces of three documents, which are what they are.
    documents = np.concatenate([3000 + np.arange(len(later)), [0, 7, 2999]])
    offsets = np.full(len(documents), -1)
    resolve(documents, offsets, 3000, 10, found.ids, found.ends, found.guide, STRIDE)
    assert list(zip(documents.tolist(), offsets.tolist(), strict=True)) == [*later, (0, 0), (7, 0), (2999, 0)]
    assert [found.later(n) for n in (0, 40, 3000)] == [sum(d < n for d, _ in later) for n in (0, 40, 3000)]
    assert [len(found.of(d)) for d in range(3000)] == [max(-(-n // 10) - 1, 0) for n in lengths]
    with pytest.raises(IndexError):
        resolve(np.array([3000 + len(later)]), offsets, 3000, 10, found.ids, found.ends, found.guide, STRIDE)
    part, alone = found.between(13, 2077), find_long(LengthList(lengths[13:2077]), 10)
    assert part.ids.tolist() == alone.ids.tolist() and part.ends.tolist() == alone.ends.tolist()


class Listed(LengthList):
    """Has its long documents at hand; nobody may ask for all lengths."""

    def long_documents(self, piece: int) -> LongDocuments:
        return find_long(LengthList(self._lengths.tolist()), piece)

    def lengths(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        assert len(ids) < len(self)
        return super().lengths(ids)


def test_a_source_may_know_its_long_documents(stream_of: StreamOf) -> None:
    lengths = [5, 90, 7] * 3000
    order = SourceOrder("web", 1, None, PieceLists(Listed(lengths))).revised(0, documents=9000, piece=10)
    assert order.eras[0].pieces == 9000 + 8 * 3000
    order.pieces_at(np.arange(100))


def _effective(sample: npt.NDArray[np.int64], document: Any, length: Any, batch: int) -> float:
    """1 / sum(p ** 2) over the documents of a batch, the mean over batches."""
    found = []
    for b in range(int(sample.max()) // batch):
        mine = sample // batch == b
        tokens = np.bincount(document[mine], length[mine])
        found.append(tokens.sum() ** 2 / (tokens**2).sum())
    return float(np.mean(found))


def _cut_and_shuffled(lengths: npt.NDArray[np.int64], seq_length: int) -> tuple[Any, Any, Any]:
    """As Megatron's GPTDataset does: documents one after another, cut into samples, and those shuffled."""
    rng = np.random.default_rng(0)
    order = rng.permutation(len(lengths))
    tokens = np.repeat(order, lengths[order])[: lengths.sum() // seq_length * seq_length].reshape(-1, seq_length)
    rows = rng.permutation(len(tokens))
    sample = np.repeat(np.arange(len(rows)), seq_length)
    return sample, tokens[rows].ravel(), np.ones(sample.size)


@pytest.mark.parametrize("mode", ["split", "best_fit"])
@pytest.mark.parametrize(("name", "least"), [("books", 0.95), ("web", 0.95)])
def test_a_batch_holds_as_many_documents_as_megatrons(stream_of: StreamOf, mode: str, name: str, least: float) -> None:
    """Pieces of a long document, and the two parts of one that is cut, are spread over the epoch."""
    rng, seq_length, batch = np.random.default_rng(5), 64, 128
    lengths = np.full(300, 30 * 64) if name == "books" else np.clip(rng.lognormal(1.74, 1, 30_000), 1, 500).astype(int)
    if name == "web" and mode == "best_fit":
        least = 0.8  # a document that fits into a sample is whole: the most that any packing of such can reach
    stream = stream_of({"seq_length": seq_length, "packing": mode, "sources": {"a": {}}}, {"a": lengths.tolist()})
    num = int(lengths.sum()) // seq_length * 9 // 10
    plan = stream.plan(0, num)
    sample = np.repeat(np.arange(num), np.diff(plan.starts))
    ours = _effective(sample, plan.table[:, 2], plan.table[:, 4], batch)
    assert ours >= least * _effective(*_cut_and_shuffled(lengths, seq_length), batch)


@pytest.mark.parametrize("mode", ["split", "best_fit", "none"])
def test_the_two_parts_of_a_document_that_was_cut_lie_far_apart(stream_of: StreamOf, mode: str) -> None:
    stream = stream_of({"seq_length": 64, "packing": mode, "sources": {"a": {}}}, {"a": [50] * 40_000})
    plan = stream.plan(0, 4000)
    sample = np.repeat(np.arange(4000), np.diff(plan.starts))
    places = defaultdict(list)
    for at, position in zip(sample.tolist(), plan.table[:, 1].tolist(), strict=True):
        places[position].append(at)
    apart = [b - a for a, b in (p for p in places.values() if len(p) > 1)]
    assert (mode == "split") == bool(apart) and all(d >= 256 for d in apart)
    assert mode != "split" or set(plan.tokens().tolist()) == {64}


@pytest.mark.parametrize("seed", range(6))
def test_every_token_once_through_sequence_lengths_and_resumes(stream_of: StreamOf, seed: int) -> None:
    """Declared stages of other lengths and packings, and states taken and resumed anywhere between them."""
    rng = random.Random(seed)
    lengths = {
        "a": [rng.randint(0, 400) for _ in range(30)],
        "b": [rng.randint(1, 60) for _ in range(50)],
    }
    stages: list[dict[str, Any]] = []
    for k in range(4):
        change: dict[str, Any] = {"seq_length": rng.choice([32, 64, 128, 256])}
        if rng.random() < 0.5:
            change["packing"] = rng.choice(["split", "none", {"mode": "best_fit", "open_bins": 4}])
        stages.append({"from_samples": 40 * (k + 1) + rng.randint(0, 20), **change})
    data = {"seq_length": 64, "packing": "best_fit", "sources": {"a": {"weight": 2}, "b": {}}, "stages": stages}
    whole = stream_of(data, lengths)
    num = 1200
    expected, digest = whole.plan(0, num), whole.digest_at(num)
    rows: list[tuple[int, ...]] = []
    at, state = 0, None
    while at < num:
        stream = stream_of(data, lengths, state)
        stop = min(at + rng.randint(1, 90), num)
        plan = stream.plan(at, stop)
        rows += [(s.source, s.epoch, s.document, s.offset, s.length) for sample in plan for s in sample]
        state, at = StreamState.from_json(stream.state_at(stop).to_json()), stop
    assert rows == [(s.source, s.epoch, s.document, s.offset, s.length) for sample in expected for s in sample]
    assert state is not None and state.digest == digest
    for s in state.waiting:
        order, position = expected.orders[s.source], np.array([s.position])
        document = int(order.documents_at(position)[0])
        rows.append((s.source, order.epoch_of(s.position), document, s.offset, s.length))
    for i, name in enumerate(lengths):
        assert state.sources[name].epoch >= 2
        for epoch in range(state.sources[name].epoch):
            for document, length in enumerate(lengths[name]):
                parts = sorted(row[3:] for row in rows if row[:3] == (i, epoch, document))
                ends = np.cumsum([0, *(n for _, n in parts)]).tolist()
                assert [offset for offset, _ in parts] == ends[:-1] and ends[-1] == length
