"""Every document in every epoch is found where the stream has it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megaresume.checkpoint.save.commit import begin_save, commit_save
from megaresume.checkpoint.system import Topology
from megaresume.runs.answer import plain
from megaresume.runs.directory import Run
from megaresume.runs.trace.find import Sought, find, parse_documents
from megaresume.runs.trace.trace import Trace
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import UsageError
from megaresume.stream.source import LongDocuments
from megaresume.stream.state import Fingerprint, SourceCursor
from megaresume.stream.stream import Stream
from tests.runs.trace.conftest import ToyRun, config
from tests.stream.orders import document_at, order_of

Parts = dict[tuple[str, int, int], list[tuple[int, int, int, int]]]


def everywhere(trace: Trace, stop: int) -> Parts:
    """(source, document, epoch) -> its segments: sample, place, offset, length."""
    parts: Parts = defaultdict(list)
    for piece in trace.pieces(0, stop):
        for row in piece.rows():
            for s in row["segments"]:
                key = s["source"], s["document"], s["epoch"]
                parts[key].append((row["sample"], s["place"], s["offset"], s["length"]))
    return parts


def parts_of(found: list[Sought]) -> Parts:
    return {
        (f.source, f.document, o.epoch): [(p.sample, p.place, p.offset, p.length) for p in o.parts]
        for f in found
        for o in f.occurrences
        if o.parts
    }


def everything(toy: ToyRun) -> list[tuple[str, int]]:
    return [(name, i) for name, lengths in toy.lengths.items() for i in range(len(lengths))]


@pytest.mark.parametrize("packing", ["split", "best_fit"])
def test_every_document_in_the_past_and_ahead(toy: ToyRun, packing: Any) -> None:
    stage = {"from_samples": 70, "weights": {"web": 1, "code": 1, "wiki": 1}}
    data = config("web 3 code 1 wiki 0", packing={"mode": packing}, stages=[stage])
    toy.attempt(data, stop=20, saves=(3, 6, 11, 16), micro=2)
    toy.attempt(data, start=11, stop=25, saves=(12, 19, 24), dp=4)
    trace = Trace(Run(toy.root), toy.sources)
    newest = trace.history.state
    assert newest.samples == 96
    documents = everything(toy)
    with_planning = find(trace, documents, until_sample=150)
    # A document whose last tokens lie behind the end is found up to there.
    assert {k: [p for p in v if p[0] < 150] for k, v in parts_of(with_planning).items() if v[0][0] < 150} == dict(
        everywhere(trace, 150)
    )
    without = find(trace, documents)
    waiting = in_two = 0
    for one, other in zip(without, with_planning, strict=True):
        length = toy.lengths[one.source][one.document]
        assert one.tokens == length and (one.occurrences == []) == (length == 0)
        for occurrence, same in zip(one.occurrences, other.occurrences, strict=False):
            order = trace.replan.orders[trace.names.index(one.source)]
            assert {document_at(p, order) for p in occurrence.positions} == {(occurrence.epoch, one.document)}
            if max(occurrence.positions) < newest.sources[one.source].position:
                assert occurrence.parts == same.parts and sum(p.length for p in occurrence.parts) == length
                trained = [p.length for p in occurrence.parts if p.sample < 96]
                partly = "partly trained" if trained else "waiting"
                assert occurrence.status == ("trained" if sum(trained) == length else partly)
                waiting += sum(trained) < length
                for part in occurrence.parts:
                    if part.sample in toy.trained:
                        t = toy.trained[part.sample]
                        assert (part.step, part.rank, part.micro_batch) == (t.step, t.rank, t.micro_batch)
            elif min(occurrence.positions) < newest.sources[one.source].position:
                assert 0 < sum(p.length for p in occurrence.parts) < length and occurrence.parts[0] in same.parts
                in_two += 1
            else:
                assert (occurrence.status, occurrence.parts) == ("not planned", [])
                assert same.status in ("to come", "not planned")
                if same.parts and occurrence.about_sample is not None:
                    assert abs(occurrence.about_sample - same.parts[0].sample) < 40
    assert waiting and in_two


def test_so_many_epochs(toy: ToyRun) -> None:
    toy.attempt(config("web 1 wiki 1", seq_length=40), stop=4, saves=(2, 4))
    trace = Trace(Run(toy.root), toy.sources)
    found = find(trace, [("wiki", 3), ("web", 7)], epochs=3)
    assert [[o.epoch for o in f.occurrences] for f in found] == [[0, 1, 2], [0, 1, 2]]
    last = max(p.sample for f in found for o in f.occurrences for p in o.parts)
    seen = everywhere(trace, last + 1)
    assert parts_of(found) == {key: parts for key, parts in seen.items() if key in parts_of(found)}
    assert plain(found[0])["occurrences"][2]["status"] == "to come"


def test_epochs_that_never_come(toy: ToyRun) -> None:
    data = config("web 1 wiki 1", packing={"mode": "none"})
    data["sources"]["wiki"]["max_epochs"] = 2
    data["sources"]["wiki"]["on_exhausted"] = "stop"
    toy.attempt(data, stop=4, saves=(4,))
    trace = Trace(Run(toy.root), toy.sources)
    (found,) = find(trace, [("wiki", 3)], epochs=9)
    assert [o.epoch for o in found.occurrences] == [0, 1]
    found = find(trace, [("web", i) for i in range(90)], epochs=9)
    assert {o.status for f in found for o in f.occurrences} >= {"never", "to come"}


def test_bad_questions(toy: ToyRun) -> None:
    stages = [{"from_step": 9, "weights": {"web": 1, "code": 0}}]
    toy.attempt(config(stages=stages), stop=2, saves=(2,))
    trace = Trace(Run(toy.root), toy.sources)
    assert parse_documents("web:17, 18,code:5") == [("web", 17), ("web", 18), ("code", 5)]
    assert parse_documents("a:b:5") == [("a:b", 5)]
    for text in ("", "web", "17", "web:", "web:-1", "web:1,,", "web:x"):
        with pytest.raises(UsageError, match="bad --find"):
            parse_documents(text)
    with pytest.raises(UsageError, match="unknown source 'books'"):
        find(trace, [("books", 1)])
    with pytest.raises(UsageError, match="document from 0 to 89"):
        find(trace, [("web", 90)])
    with pytest.raises(UsageError, match="weight 0 in the stage 'stage 1'"):
        find(trace, [("code", 5)], epochs=2)


class Endless:
    """10^9 documents that are nowhere."""

    asked = 0

    def __len__(self) -> int:
        return 10**9

    def lengths(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        self.asked += len(ids)
        return 20 + ids % 40

    def long_documents(self, piece: int) -> LongDocuments:
        return LongDocuments.of_lists(np.zeros(0, np.int64), np.zeros(0, np.int64))

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(documents=10**9, tokens=39_500_000_000, lengths="0" * 32)


def test_a_billion_documents(tmp_path: Path) -> None:
    """The work is that between two records, wherever the document lies."""
    source = Endless()
    conf = StreamConfig.from_dict({"seed": 1, "seq_length": 64, "packing": "none", "sources": {"web": {"weight": 1}}})
    stream = Stream(conf, [source])
    state = stream.state_at(0, batches=[(0, 8)])
    topology = Topology(dp=2, micro_batch_size=2, global_batch_size=8)
    positions = []
    for far in (2 * 10**8, 7 * 10**8, 9 * 10**8):
        # No document is longer than a sample: one each, and any position is a state.
        at = SourceCursor(
            position=far,
            epoch=0,
            eras=state.sources["web"].eras,
            documents=far,
            tokens=30 * far,
            skipped=0,
            drawn_in_stage=0,
            exhausted=False,
        )
        begun = state.replace(samples=far, documents=far, tokens=30 * far, sources={"web": at}, digest=f"{far:016x}")
        stream = Stream(conf, [source], state=begun)
        for samples in (far, far + 4000):
            iteration = samples // 8
            saved = stream.state_at(samples, batches=[(0, 8)])
            tag = f"global_step{iteration}"
            pending = begin_save(tmp_path, tag=tag, iteration=iteration, state=saved, topology=topology)
            (tmp_path / tag).mkdir()
            (tmp_path / tag / "w").write_bytes(b"w")
            commit_save(pending, expected_files=["w"])
        positions.append(far + 1234)
    trace = Trace(Run(tmp_path), {"web": source})
    source.asked = 0
    order = order_of(10**9, 1, "web")
    documents = [document_at(position, order) for position in positions]
    found = find(trace, [("web", document) for _, document in documents])
    for f, position in zip(found, positions, strict=True):
        first = f.occurrences[0]
        sample = first.parts[0].sample
        assert (first.epoch, first.positions, sample) == (0, [position], position)
        assert first.parts[0].step == position // 8 + 1
    # Planned by blocks, looked up by chunks.
    assert source.asked < 200_000
