"""A trace is what the attempts that lead to the present trained, and what the stream goes on with."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.records.names import deepspeed_tag, megatron_tag
from megaresume.checkpoint.system import Topology
from megaresume.runs.directory import Run
from megaresume.runs.trace.trace import Trace
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import CheckpointError, CorpusError, StateError, StreamExhausted, UsageError
from megaresume.testing import LengthList
from tests.runs.trace.conftest import ToyRun, config, segments_of

BEFORE, AFTER = config(), config("web 1 code 1 wiki 2", seq_length=48, packing={"mode": "split"})


def eventful(toy: ToyRun) -> ToyRun:
    """Two branches given up, a step saved again with other data, a stage, three layouts, two batch sizes."""
    toy.attempt(BEFORE, stop=7, saves=(2, 4, 6), dp=2, micro=1)
    toy.attempt(BEFORE, start=4, stop=8, saves=(5, 8), dp=1, micro=4)
    toy.attempt(AFTER, start=4, stop=9, saves=(6, 8), dp=1, micro=2)  # as if 5 and 8 had been a mistake
    toy.attempt(AFTER, start=6, stop=11, saves=(7, 10), dp=3, micro=1, batch=6)
    toy.attempt(AFTER, start=10, stop=12, dp=2, micro=2, batch=8)  # killed before it saved
    return toy


def rows(trace: Trace, first: int, stop: int) -> list[dict[str, Any]]:
    return [row for piece in trace.pieces(first, stop) for row in piece.rows()]


def assert_is_what_was_trained(run: ToyRun, found: list[dict[str, Any]]) -> None:
    for row in found:
        trained = run.trained[row["sample"]]
        place = trained.step, trained.rank, trained.micro_batch
        assert (row["step"], row["rank"], row["micro_batch"]) == place, row["sample"]
        assert row["segments"] == trained.segments, row["sample"]
        assert row["tokens"] == sum(s["length"] for s in trained.segments)


@pytest.mark.parametrize("tag", [deepspeed_tag, megatron_tag])
def test_every_range_of_an_eventful_run(toy: ToyRun, tag: Any) -> None:
    toy.tag = tag
    run = eventful(toy)
    trace = Trace(Run(run.root), run.sources)
    stop = max(run.trained) + 1
    assert stop == 4 * 6 + 6 * 4 + 8 * 2
    for first in range(stop):
        found = rows(trace, first, stop)
        assert [row["sample"] for row in found] == list(range(first, stop))
        assert_is_what_was_trained(run, found)
    assert trace.steps.samples(1, 13) == (0, stop)
    assert trace.history.notes == []


def test_from_every_record_alone_and_from_none(toy: ToyRun, tmp_path: Path) -> None:
    """The older states are a short cut: without them the stages of the newest one tell."""
    run = eventful(toy)
    names = ["step_0000002", "step_0000004", "step_0000006", "step_0000007"]
    for k, kept in enumerate([*names, None]):
        root = shutil.copytree(run.root, tmp_path / str(k))
        for name in names:
            if name != kept:
                (root / "megaresume" / f"{name}.json").unlink()
        trace = Trace(Run(root), run.sources)
        assert len(trace.history.saved) == (2 if kept else 1)
        assert_is_what_was_trained(run, rows(trace, 0, 64))
        assert trace.work(60, 64) == 64 - trace.history.state.samples


def test_without_a_ledger(toy: ToyRun) -> None:
    """Sample numbers, and the layouts that the states themselves tell."""
    run = eventful(toy)
    (run.root / "megaresume" / "ledger.jsonl").unlink()
    trace = Trace(Run(run.root), run.sources)
    found = rows(trace, 0, 48)
    assert [row["segments"] for row in found] == [run.trained[s].segments for s in range(48)]
    # A state of another branch shows by the stage that it lacks.
    rows(trace, 21, 22)
    assert len(trace.history.notes) == 1 and "step_0000005.json: has stages" in trace.history.notes[0]


def test_layouts_of_a_run_that_went_back_twice(toy: ToyRun) -> None:
    toy.attempt(BEFORE, stop=7, saves=(2, 6), dp=2)
    toy.attempt(BEFORE, start=6, stop=9, saves=(8,), dp=1)
    toy.attempt(BEFORE, start=2, stop=12, saves=(9, 12), dp=4)
    assert_is_what_was_trained(toy, rows(Trace(Run(toy.root), toy.sources), 0, 48))


@pytest.mark.parametrize("segments", [[(0, 4)], [(0, 4), (10, 6)], [(0, 4), (5, 8), (6, 2), (31, 3)]])
def test_steps_of_batch_sizes_that_change_anywhere(segments: list[tuple[int, int]]) -> None:
    """A step that has begun keeps its size."""
    schedule = BatchSchedule(tuple(segments))
    begins = [schedule.after(0, n) for n in range(30)]
    before = 0
    for first, size, number in schedule.runs(begins[-1] + 1):
        assert begins[before : before + number] == [first + k * size for k in range(number)]
        before += number
    assert before == len(begins)


def test_what_is_declared_is_traced_ahead(toy: ToyRun) -> None:
    stages = [
        {"from_step": 6, "weights": {"web": 0, "code": 1}, "name": "code only"},
        {"from_samples": 33, "packing": "none"},
    ]
    data = config(stages=stages)
    toy.attempt(data, stop=3, saves=(2, 3))
    stream = toy.stream(data)
    stream.schedule = BatchSchedule.constant(4)
    trace = Trace(Run(toy.root), toy.sources)
    pieces = list(trace.pieces(0, 50))
    found = [row for piece in pieces for row in piece.rows()]
    assert [row["segments"] for row in found] == [segments_of(stream, s) for s in range(50)]
    assert [(p.stage, p.past, p.span.first) for p in pieces if p.span.first in (0, 12, 24, 33)] == [
        ("start", True, 0),
        ("start", False, 12),
        ("code only", False, 24),
        ("stage 2", False, 33),
    ]


def test_the_stream_ends(toy: ToyRun) -> None:
    data = config("web 1", packing={"mode": "none"})
    data["sources"]["web"] |= {"max_epochs": 1, "on_exhausted": "stop"}
    toy.attempt(data, stop=2, saves=(2,))
    trace = Trace(Run(toy.root), toy.sources)
    whole = sum(-(-length // 64) for length in toy.lengths["web"])
    assert len(rows(trace, 0, whole)) == whole
    for first in (0, whole - 1, whole, 10 * whole):
        with pytest.raises(StreamExhausted, match=f"the stream has {whole} samples"):
            rows(trace, first, 10 * whole + 1)


def test_records_that_are_damaged_or_of_another_branch_are_passed_over(toy: ToyRun) -> None:
    run = eventful(toy)
    records = run.root / "megaresume"
    (records / "step_0000006.json").write_bytes(b"{")
    shutil.copy(next((records / "superseded").glob("step_0000008*")), records / "step_0000007.json")
    trace = Trace(Run(run.root), run.sources)
    assert_is_what_was_trained(run, rows(trace, 35, 64))
    assert [note.split(":")[1] for note in trace.history.notes] == [" step_0000007.json", " step_0000006.json"]


def test_the_newest_state_is_damaged(toy: ToyRun) -> None:
    """What follows the one before is planned; its stages are the same here."""
    run = eventful(toy)
    (run.root / "megaresume" / "step_0000010.json").write_bytes(b"")
    trace = Trace(Run(run.root), run.sources)
    assert trace.history.newest.iteration == 7 and "step_0000010" in trace.history.notes[0]
    assert [r["segments"] for r in rows(trace, 0, 64)] == [run.trained[s].segments for s in range(64)]


def test_a_save_that_was_killed_before_its_line(toy: ToyRun) -> None:
    """Its state is there, and nothing later is."""
    toy.attempt(BEFORE, stop=5, saves=(2, 5))
    ledger = toy.root / "megaresume" / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:-1]))
    assert Trace(Run(toy.root), toy.sources).history.newest.iteration == 5
    ledger.write_bytes(b"".join(lines[:-1]))
    toy.attempt(AFTER, start=2, stop=4, saves=(4,))  # went on from 2, otherwise
    trace = Trace(Run(toy.root), toy.sources)
    assert [r.iteration for r in trace.history.saved] == [2, 4]
    assert_is_what_was_trained(toy, rows(trace, 0, 16))


def test_other_corpora_are_refused(toy: ToyRun) -> None:
    toy.attempt(BEFORE, stop=2, saves=(2,))
    other = {**toy.sources, "code": LengthList([7] * 40)}
    with pytest.raises(StateError, match="'code' is not the corpus"):
        Trace(Run(toy.root), other)
    missing = Trace(Run(toy.root), {"web": toy.sources["web"]})
    with pytest.raises(CorpusError, match="'code' is no longer in the data config"):
        rows(missing, 0, 1)


def test_a_digest_that_is_not_the_recorded_one_is_told(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.attempt(BEFORE, stop=4, saves=(2, 4))
    trace = Trace(Run(toy.root), toy.sources)
    points = trace.replan._points
    points[:] = [replace(p, digest="0" * 16) if p.samples == 8 else p for p in points]
    assert len(rows(trace, 8, 16)) == 8
    with pytest.raises(CheckpointError, match="megaresume verify"):
        rows(trace, 7, 9)


def test_steps_that_do_not_fit_are_not_guessed(toy: ToyRun) -> None:
    toy.attempt(BEFORE, stop=4, saves=(2, 4))
    trace = Trace(Run(toy.root), toy.sources)
    history = trace.history
    history.points[0] = replace(history.points[0], iteration=1)
    steps = type(trace.steps)(history)
    with pytest.raises(StateError, match="iterations and the batch sizes"):
        steps.samples(1, 2)
    assert steps.step_of(3) is None
    # A run that began with another one's weights at iteration 100 counts from there.
    history.points[:] = [replace(point, iteration=point.samples // 4 + 100) for point in history.points]
    steps = type(trace.steps)(history)
    assert steps.samples(101, 103) == (0, 8) and steps.step_of(9) == 103
    with pytest.raises(UsageError, match="steps from 101 on"):
        steps.samples(100, 101)


def test_ranks_that_no_record_tells(toy: ToyRun) -> None:
    toy.attempt(BEFORE, stop=2, saves=(2,))
    trace = Trace(Run(toy.root), toy.sources)
    for topology in (Topology(dp=2, global_batch_size=4), Topology(dp=3, micro_batch_size=1, global_batch_size=4)):
        trace.history.topologies[0] = (0, topology)
        (row,) = rows(trace, 5, 6)
        assert (row["step"], row["rank"], row["micro_batch"]) == (2, None, None)
        assert trace.place(5) == (2, None, None)


def test_nothing_to_trace(toy: ToyRun, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        Trace(Run(tmp_path / "nowhere"), {})
    with pytest.raises(CheckpointError, match="no data state"):
        Trace(Run(tmp_path), {})
