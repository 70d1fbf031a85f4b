"""`Run`: every part is read once; what was read stays as it was, whatever happens to the directory."""

from __future__ import annotations

import shutil

import pytest

from megaresume.checkpoint.records.names import ledger_path, step_path
from megaresume.runs.directory import Run
from megaresume.stream.errors import CheckpointError
from tests.runs.trace.conftest import ToyRun, config, toy  # noqa: F401  a fixture

DATA = config("web 3 code 1")


def test_every_part_is_read_once(toy: ToyRun) -> None:  # noqa: F811
    toy.attempt(DATA, stop=6, saves=(2, 4, 6))
    run = Run(toy.root)
    assert [c.tag for c in run.candidates] == ["global_step6", "global_step4", "global_step2"]
    assert run.choice is not None and run.choice.tag == "global_step6" and run.resumable
    lines, points = run.ledger.entries, run.history.points
    assert [p.iteration for p in points] == [2, 4, 6] and len(lines) == 4
    shutil.rmtree(toy.root)
    assert run.ledger.entries is lines and run.history.points is points
    assert run.choice.tag == "global_step6" and run.pointers[0].tag == "global_step6"
    assert [e.status for e in run.newest(1)] == ["complete"]


def test_what_a_later_start_gave_up_is_on_no_path(toy: ToyRun) -> None:  # noqa: F811
    toy.attempt(DATA, stop=6, saves=(2, 4, 6))
    toy.attempt(DATA, start=2, stop=5, saves=(3, 5), dp=4)
    history = Run(toy.root).history
    assert [p.iteration for p in history.points] == [2, 3, 5]
    assert [(first, t.dp) for first, t in history.topologies] == [(0, 2), (8, 4)]


def test_choosing_again_says_nothing_twice(toy: ToyRun) -> None:  # noqa: F811
    toy.attempt(DATA, stop=4, saves=(2, 4))
    (toy.root / "global_step4" / "weights.pt").write_bytes(b"cut")
    (toy.root / "latest").write_text("global_step9")
    run = Run(toy.root)
    first, second = run.choose(), run.choose()
    assert first is not None and first == second and [r.tag for r in first.rejected] == ["global_step4"]
    assert sum("latest names 'global_step9'" in note for note in first.notes) == 1
    assert run.choose(2) is not None
    with pytest.raises(CheckpointError, match="iteration 4 cannot be loaded"):
        run.choose(4)
    assert run.error is None and run.choice is not None and run.choice.tag == "global_step2"


def test_a_damaged_state_is_named_without_a_ledger_too(toy: ToyRun) -> None:  # noqa: F811
    toy.attempt(DATA, stop=4, saves=(2, 4))
    ledger_path(toy.root).unlink()
    step_path(toy.root, 4, "global_step4").write_bytes(b"{}")
    history = Run(toy.root).history
    assert history.newest.iteration == 2 and [p.iteration for p in history.saved] == [2]
    (note,) = history.notes
    assert note.startswith("not used: step_0000004.json")
