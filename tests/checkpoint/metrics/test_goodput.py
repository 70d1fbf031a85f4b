"""What becomes of the time: scripted runs, each second of which is of one kind."""

from __future__ import annotations

from typing import Any

import pytest

from megaresume.checkpoint.metrics.figures import BY_NAME
from megaresume.checkpoint.metrics.goodput import all_marks, goodput_of, has_gaps, marks_of_ledger
from megaresume.checkpoint.metrics.record import Mark
from megaresume.checkpoint.records.ledger import LedgerEntry
from megaresume.checkpoint.system import Topology, utc


def mark(
    event: str, time: float, step: int, waited: float = 0.0, saving: float = 0.0, born: float = 0.0, attempt: int = 0
) -> Mark:
    place: dict[str, Any] = {"step": step, "samples": 8 * step, "waited": waited, "saving": saving, "attempt": attempt}
    return Mark(event=event, time=1000 + time, born=1000 + born if event == "start" else 0.0, **place)


#: killed at 90 after step 8, with a save of step 5 at 60; queued until 200; ends at 300 with step 15.
RUN = [
    mark("start", 10, 0, born=0),
    mark("save", 60, 5, waited=4, saving=6),
    mark("last", 90, 8, waited=5, saving=6),
    mark("start", 230, 5, born=200),
    mark("save", 260, 10, waited=1, saving=3),
    mark("end", 300, 15, waited=2, saving=6),
]


def test_every_second_is_of_one_kind() -> None:
    found = goodput_of(RUN)
    assert found.seconds == 300
    assert found.badput == {"startup": 10 + 30, "data": 4 + 2, "saving": 6 + 6, "lost": 30, "waiting": 110}
    assert found.goodput == pytest.approx((300 - 40 - 6 - 12 - 30 - 110) / 300)
    assert (found.starts, found.repeated) == (2, 24)


def test_badput_is_a_gauge_since_a_start_after_a_kill_takes_some_of_it_back() -> None:
    before, after = goodput_of(RUN[:3]).badput, goodput_of(RUN[:4]).badput
    assert (before["data"], before["lost"]) == (5, 0)
    assert (after["data"], after["lost"]) == (4, 30)
    assert BY_NAME["megaresume.badput"].kind == "gauge"


def test_a_run_that_trains_now() -> None:
    found = goodput_of([*RUN[:1], mark("now", 50, 4, waited=4)])
    assert (found.seconds, found.badput["data"], found.badput["lost"]) == (50, 4, 0)


def test_a_start_that_goes_back_further_gives_up_more() -> None:
    again = [*RUN[:5], mark("last", 280, 12, waited=2, saving=3), mark("start", 300, 5, born=290)]
    found = goodput_of(again)
    assert found.badput["lost"] == 30 + 50  # all that the second process has made
    assert found.badput["waiting"] == 110 + 10


def test_a_kill_that_took_the_mark_of_a_save() -> None:
    """The save of step 6 is known only by the start that resumes from it: a part of the steps is taken as kept."""
    found = goodput_of([mark("start", 10, 0, born=0), mark("last", 90, 8), mark("start", 110, 6, born=100)])
    assert found.badput["lost"] == pytest.approx(80 * 2 / 8)


def test_a_step_that_was_not_finished_is_lost() -> None:
    found = goodput_of(
        [mark("start", 10, 0, born=0), mark("save", 50, 5), mark("last", 90, 5), mark("start", 110, 5, born=100)]
    )
    assert found.badput["lost"] == 40


def test_nothing_is_known() -> None:
    assert goodput_of([]).goodput == 0


def entry(kind: Any, time: float, step: int, **details: Any) -> LedgerEntry:
    return LedgerEntry(
        kind=kind,
        iteration=step,
        tag=None,
        samples=8 * step,
        digest="0" * 16,
        run="0" * 16,
        time=utc(1000 + time),
        topology=Topology(),
        details=details,
    )


LEDGER = [
    entry("start", 10, 0, startup_seconds=10),
    entry("checkpoint", 50, 5, save_seconds=6),
    entry("start", 230, 5, startup_seconds=30),
    entry("finished", 300, 15),
]


def test_a_run_that_nobody_measured() -> None:
    found = goodput_of(marks_of_ledger(LEDGER))
    assert found.seconds == 300
    assert found.badput == {"startup": 40, "data": 0, "saving": 6, "lost": 0, "waiting": 200 - 56}


def test_what_was_measured_later_comes_after_what_the_ledger_tells() -> None:
    measured = [mark("start", 230, 5, born=200, attempt=2), mark("end", 300, 15, waited=2)]
    assert has_gaps(measured)
    found = goodput_of(all_marks(measured, LEDGER))
    assert (found.starts, found.badput["startup"], found.badput["data"]) == (2, 40, 2)


def test_a_start_that_nobody_measured_between_two_that_were() -> None:
    """``metrics=`` was left out once: it is a start all the same, and its time is not one of waiting."""
    ledger = [*LEDGER[:3], entry("checkpoint", 260, 10, save_seconds=5), entry("start", 330, 10, startup_seconds=10)]
    measured = [
        mark("start", 10, 0, born=0, attempt=1),
        mark("save", 56, 5, saving=6),
        mark("last", 90, 8, saving=6),
        mark("start", 330, 10, born=320, attempt=3),
        mark("now", 400, 20, waited=3),
    ]
    assert has_gaps(measured) and not has_gaps(measured[:3])
    found = goodput_of(all_marks(measured, ledger))
    assert (found.seconds, found.starts) == (400, 3)
    startup, waiting = 10 + 30 + 10, (200 - 90) + (320 - 265)
    assert found.badput == {"startup": startup, "data": 3, "saving": 6 + 5, "lost": 34, "waiting": waiting}


def test_a_launch_of_a_run_that_is_over_is_none_of_its_time() -> None:
    ledger = [*LEDGER, entry("start", 5000, 15, startup_seconds=5, nothing_to_train=True)]
    assert goodput_of(all_marks([], ledger)).seconds == 300


def test_a_load_in_the_middle_of_a_process_is_no_other_start() -> None:
    marks = [
        mark("start", 10, 0, born=0, attempt=1),
        mark("end", 90, 8, waited=5),
        mark("start", 91, 5, born=91, waited=5, attempt=1),
        mark("now", 120, 9, waited=6),
    ]
    found = goodput_of(marks)
    assert (found.starts, found.repeated, found.badput["data"]) == (1, 24, 1 + 5 * 5 / 8)
