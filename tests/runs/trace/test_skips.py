"""Runs that leave samples and documents out: the trace is what was trained, and says what was not."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from megaresume.runs.directory import Run
from megaresume.runs.trace.find import find
from megaresume.runs.trace.formats import TraceWriter, csv_rows, heading
from megaresume.runs.trace.trace import Trace
from megaresume.stream.skips import absolute
from megaresume.stream.state import StreamState
from tests.runs.trace.conftest import ToyRun, config

SKIP = {"samples": ["30:37", "60:62"], "documents": {"web": [7, 30, 55]}}


@pytest.fixture
def skipping(toy: ToyRun) -> ToyRun:
    """The first attempt knows of no skip, and trains 30 to 36; it dies, the second leaves them out."""
    toy.attempt(config(), stop=12, saves=(4, 7, 12))
    toy.attempt(config(skip=SKIP), start=4, stop=9, saves=(9,), dp=1, micro=2)
    toy.attempt(config(skip=SKIP), start=9, stop=22, saves=(15, 22), batch=8, dp=4)
    return toy


def test_what_was_trained_and_what_was_not(skipping: ToyRun) -> None:
    trace = Trace(Run(skipping.root), skipping.sources)
    last = max(skipping.trained) + 1
    pieces = list(trace.pieces(0, last))
    rows = [row for p in pieces if not p.left_out for row in p.rows()]
    assert [row["sample"] for row in rows] == list(range(last))
    for row in rows:
        one = skipping.trained[row["sample"]]
        assert (row["step"], row["rank"], row["micro_batch"]) == (one.step, one.rank, one.micro_batch)
        assert row["segments"] == one.segments
    absolute = [row["absolute"] for p in pieces for row in p.rows()]
    assert absolute == list(range(last + 9))
    gone = [row for p in pieces if p.left_out for row in p.rows()]
    assert [row["absolute"] for row in gone] == [*range(30, 37), 60, 61]
    assert all(row["sample"] is None and row["step"] is None and row["segments"] for row in gone)
    assert [heading(p).split(",")[0] for p in pieces if p.left_out] == ["# left out"] * 2
    # Each is in exactly one of two ranges that lie side by side.
    assert sum(p.left_out for p in trace.pieces(0, 30)) == 0 and sum(p.left_out for p in trace.pieces(30, 31)) == 1


def test_formats(skipping: ToyRun) -> None:
    trace = Trace(Run(skipping.root), skipping.sources)
    pieces = list(trace.pieces(28, 33))
    rows = [row for p in pieces for row in p.rows()]
    writers = {form: TraceWriter(form, trace.names, numbered=True) for form in ("json", "csv", "text")}
    text = {form: b"".join(bytes(writer.write(p)) for p in pieces) for form, writer in writers.items()}
    assert [json.loads(line) for line in text["json"].splitlines()] == rows
    expected = [[str("" if c is None else c) for c in line] for row in rows for line in csv_rows(row)]
    assert list(csv.reader(io.StringIO(text["csv"].decode()))) == expected
    lines = text["text"].decode().splitlines()
    assert "sample 29 (absolute 29)" in lines[1] and "sample 30 (absolute 37)" in lines[9]
    assert lines[2].startswith("step ?  sample ? (absolute 30)  rank ?")


def test_find(skipping: ToyRun) -> None:
    trace = Trace(Run(skipping.root), skipping.sources)
    gone = next(row for p in trace.pieces(30, 31) if p.left_out for row in p.rows())
    segment = next(s for s in gone["segments"] if s["offset"] == 0 and s["document"] not in (7, 30, 55))
    (found,) = find(trace, [(segment["source"], segment["document"])])
    occurrence = found.occurrences[segment["epoch"]]
    assert occurrence.status == "left out" and not occurrence.parts and occurrence.left_out == found.tokens
    seen: set[str] = set()
    for document in (7, 30, 55):
        (found,) = find(trace, [("web", document)])
        for o in found.occurrences:
            seen.add(o.status)
            samples = [
                s
                for s, one in skipping.trained.items()
                for g in one.segments
                if (g["source"], g["document"], g["epoch"]) == ("web", document, o.epoch)
            ]
            assert sorted({p.sample for p in o.parts}) == sorted(set(samples))
            assert (o.status == "trained") == bool(samples)
    assert "left out" in seen


def test_a_state_of_a_branch_without_the_skip_is_not_used(skipping: ToyRun) -> None:
    trace = Trace(Run(skipping.root), skipping.sources)
    assert [r.iteration for r in trace.history.saved] == [4, 9, 15, 22]


def test_verify(skipping: ToyRun) -> None:
    from megaresume.runs.trace.points import RecordedPoint, check_points
    from megaresume.stream.config import StreamConfig
    from megaresume.stream.fields import comparable
    from megaresume.stream.left_out import NO_SKIPS
    from megaresume.stream.stream import Stream

    last = skipping.states[22]
    stream = Stream(
        StreamConfig.from_dict(last.config),
        [skipping.sources[name] for name in last.sources],
        past=last,
    )
    points = [
        RecordedPoint(origin=str(k), sample=s.samples, digest=s.digest, position=comparable(_fields(s)))
        for k, s in skipping.states.items()
        if k != 7 and k != 12
    ]
    assert all(checked.holds for checked in check_points(stream, points))
    wrong = Stream(
        StreamConfig.from_dict(last.config),
        [skipping.sources[n] for n in last.sources],
        past=last.replace(skips=NO_SKIPS),
    )
    assert not all(checked.holds for checked in check_points(wrong, points))


def _fields(state: StreamState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in StreamState.__slots__}


def test_a_long_list_whose_file_is_gone(toy: ToyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaresume.stream.skips.MOST_WRITTEN", 1)
    toy.attempt(config(), stop=4, saves=(4,))
    file = tmp_path / "ids.txt"
    file.write_text("7\n30\n55\n")
    toy.attempt(config(skip={"documents": {"web": {"file": str(file)}}}), start=4, stop=9, saves=(9,))
    file.unlink()
    trace = Trace(Run(toy.root), toy.sources)
    rows = [row for p in trace.pieces(0, 36) for row in p.rows()]
    assert [row["segments"] for row in rows] == [toy.trained[k].segments for k in range(36)]


def test_three_stages_two_skips_two_batch_sizes_three_topologies_four_kills(toy: ToyRun) -> None:
    """Byte for byte what was trained, as the last attempt at each sample trained it."""
    skips = [{"samples": ["50:57"]}, {"samples": ["50:57", "140:150"], "documents": {"code": [3, 7]}}]
    longer = {"mode": "split", "align": 1}
    toy.attempt(config(), stop=13, saves=(5, 10, 13))
    toy.attempt(config(skip=skips[0]), start=10, stop=19, saves=(15,), dp=1, micro=2)  # went back before what 13 saved
    toy.attempt(config("web 1 code 2 wiki 1", skip=skips[0]), start=15, stop=24, saves=(20, 24), dp=4, batch=8)
    toy.attempt(config("web 1 code 2 wiki 1", skip=skips[1]), start=20, stop=30, saves=(28,), dp=4, batch=8)
    data = config("web 1 code 2 wiki 1", skip=skips[1], packing=longer, seq_length=96)
    toy.attempt(data, start=28, stop=40, saves=(34, 40), dp=2, batch=4)
    trace = Trace(Run(toy.root), toy.sources)
    last = max(toy.trained) + 1
    assert [s.name for s in trace.history.state.stages] == ["start", "stage 2", "stage 3"]
    assert trace.history.state.reached == last + 7 + 10
    writer = TraceWriter("json", trace.names, numbered=True)
    found = b"".join(bytes(writer.write(p)) for p in trace.pieces(0, last) if not p.left_out).splitlines()
    hashes = iter(json.loads(line)["hash"] for line in found)
    skipped = trace.history.state.skips.ranges
    expected = []
    for sample in range(last):
        one = toy.trained[sample]
        row = {
            "step": one.step,
            "sample": sample,
            "rank": one.rank,
            "micro_batch": one.micro_batch,
            "tokens": sum(s["length"] for s in one.segments),
            "absolute": absolute(skipped, sample),
            "hash": next(hashes),
            "segments": one.segments,
        }
        expected.append(json.dumps(row).encode())
    assert found == expected
