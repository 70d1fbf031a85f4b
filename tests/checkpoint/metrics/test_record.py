"""What a kill or a full disk leaves in the record, and what the next start makes of it."""

from __future__ import annotations

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megaresume import open_stream
from megaresume.checkpoint.metrics.clocks import Clocks
from megaresume.checkpoint.metrics.figures import Reading
from megaresume.checkpoint.metrics.goodput import goodput_of
from megaresume.checkpoint.metrics.looker import Looker, Shared, Watched
from megaresume.checkpoint.metrics.record import Lines, Mark, RunRecord, counts_at, marks_of, read_lines
from megaresume.checkpoint.metrics.sources import SourceFigures
from megaresume.checkpoint.metrics.words import parse
from tests.checkpoint.metrics.runs import Chain, config_of, write_sources


@contextmanager
def full_after(nbytes: int) -> Iterator[None]:
    """No file may become longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_line_after_one_that_a_full_disk_has_cut(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "lines")
    lines.append({"line": 1})
    with full_after(18), pytest.raises(OSError):
        lines.append({"line": 2, "long": "x" * 100})
    lines.append({"line": 3})
    lines.close()
    assert read_lines(tmp_path / "lines") == [{"line": 1}, {"line": 3}]


def watched(root: Path) -> Watched:
    of_run: Any = {"samples": lambda: 16, "step": lambda: 2, "numbers": None, "run": "0" * 16}
    return Watched(stream=None, root=root, attempt=1, born=0.0, **of_run)


def test_a_mark_that_found_a_full_disk_is_written_later(tmp_path: Path) -> None:
    """A start that is missing would be a start less, and the waiting before it none."""
    shared = Shared(parse("jsonl"), Clocks(), 0)
    looker = Looker(shared, watched(tmp_path))
    looker.pulse()  # opens nothing
    looker._open()
    with full_after(10), pytest.raises(OSError):
        looker.note(Mark(event="start", time=1.0, step=0, samples=0, attempt=1))
    looker.note(Mark(event="save", time=2.0, step=2, samples=16))
    looker.close()
    written = marks_of(read_lines(tmp_path / "megaresume/meter/run.jsonl"))
    assert [(mark.event, mark.time) for mark in written] == [("start", 1.0), ("save", 2.0)]


def test_a_full_disk_keeps_no_reading_from_the_sinks(tmp_path: Path) -> None:
    """And what was not written is, once there is room."""
    told: list[Reading] = []
    looker = Looker(Shared(parse([told.append]), Clocks(), 0), watched(tmp_path))
    looker.look()
    for _ in range(2):
        with full_after(10), pytest.raises(OSError):
            looker.look()
    looker.look()
    looker.close()
    assert len(told) == 4
    meter = tmp_path / "megaresume/meter"
    assert [line["time"] for line in read_lines(meter / "figures.jsonl")] == [reading.time for reading in told]
    assert len(read_lines(meter / "rank_00000.jsonl")) == 4


def test_a_kill_between_a_start_and_its_pulse(tmp_path: Path) -> None:
    """The pulse is of the process before: its end is in the record already, and is not written after the start."""
    first = RunRecord(tmp_path)
    first.note(Mark(event="start", time=10.0, born=1.0, step=0, samples=0, attempt=1), {})
    first.pulse(Mark(event="now", time=20.0, step=3, samples=24))
    first.close()
    second = RunRecord(tmp_path)
    second._lines.append(Mark(event="start", time=40.0, born=30.0, step=2, samples=16, attempt=2).to_dict())
    second.close()  # killed: no pulse
    third = RunRecord(tmp_path)
    third.note(Mark(event="start", time=60.0, born=50.0, step=2, samples=16, attempt=3), {})
    marks = marks_of(read_lines(tmp_path / "run.jsonl"))
    assert [mark.event for mark in marks] == ["start", "last", "start", "start"]
    assert goodput_of(marks).repeated == 8


def test_counts_of_a_branch_that_was_given_up_are_passed_over() -> None:
    def line(event: str, samples: int, tokens: int | None = None) -> dict[str, Any]:
        counts = {} if tokens is None else {"counts": {"trained": {"web": tokens}}}
        return {"event": event, "samples": samples, **counts}

    lines = [line("start", 0, 0), line("save", 40, 400), line("save", 80, 800), line("save", 120, 1200)]
    assert counts_at(lines, 120) == {"trained": {"web": 1200}}
    lines += [line("last", 130), line("start", 40, 400), line("save", 80, 600)]
    assert counts_at(lines, 80) == {"trained": {"web": 600}}
    assert counts_at(lines, 120) is None


def test_what_is_not_known_is_left_out_and_stays_so(tmp_path: Path) -> None:
    write_sources(tmp_path)
    figures = SourceFigures(open_stream(config_of(tmp_path)), 80)
    reading = figures.advance(120)
    assert not {"megaresume.source.trained", "megaresume.source.cut"} & set(reading)
    whole = SourceFigures(open_stream(config_of(tmp_path)), 0)
    whole.advance(120)
    assert reading["megaresume.source.tokens"] == whole.counts["tokens"]
    assert figures.counts == {name: whole.counts[name] for name in ("tokens", "documents")}
    assert "megaresume.source.cut" not in SourceFigures(open_stream(config_of(tmp_path)), 120, figures.counts).advance(
        130
    )


@pytest.mark.process
def test_a_kill_between_a_checkpoint_and_its_mark(tmp_path: Path) -> None:
    write_sources(tmp_path)
    run = Chain(tmp_path, config_of(tmp_path))
    run.run(kill_after_commit=10, status=1, until=15)
    run.run(until=15)
    ledger = read_lines(run.save_dir / "megaresume/ledger.jsonl")
    assert [line["iteration"] for line in ledger if line["kind"] in ("start", "checkpoint")] == [0, 5, 10, 10, 15]
    marks = read_lines(run.save_dir / "megaresume/meter/run.jsonl")
    assert [line["step"] for line in marks if line["event"] == "save"] == [5, 15]
    assert marks[-1]["counts"] == run.counts(15)
    last = json.loads((run.save_dir / "megaresume/meter/figures.jsonl").read_text().splitlines()[-1])["figures"]
    for what, expected in run.counts(15).items():
        assert last[f"megaresume.source.{what}"] == expected
