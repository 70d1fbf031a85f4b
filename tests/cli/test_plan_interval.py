"""`megaresume plan DIR --mtbf 6h`: the formulas against a simulation, the ledger's times, what is printed."""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

import pytest

from megaresume.checkpoint.records.ledger import LedgerEntry, append_ledger, read_ledger
from megaresume.checkpoint.system import Topology, process_age, utc
from megaresume.program import main
from megaresume.runs.directory import Run
from megaresume.runs.plan.interval import advise, daly, duration, losses, measure, spell, young
from tests.cli.conftest import SavedRun, megaresume, run  # noqa: F401  a fixture

LAYOUT = Topology(dp=8, global_batch_size=8)


class Ledger:
    """Writes a ledger line by line, with a clock of its own."""

    def __init__(self, root: Path) -> None:
        self.root, self.path, self.now = root, root / "megaresume" / "ledger.jsonl", 1.79e9

    def line(self, kind: str, iteration: int, topology: Topology = LAYOUT, **details: object) -> None:
        entry = LedgerEntry(
            kind=kind,  # type: ignore[arg-type]
            iteration=iteration,
            tag=f"global_step{iteration}" if iteration else None,
            samples=8 * iteration,
            digest="0" * 16,
            run="a" * 16,
            time=utc(self.now),
            topology=topology,
            details=details,
        )
        append_ledger(self.path, entry)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Six saves of 63 to 68 seconds, every 1,000 steps of 2.9 seconds, durable later; a restart after the third."""
    made = Ledger(tmp_path)
    made.line("start", 0, startup_seconds=140)
    for k in range(1, 7):
        made.now += 2900
        made.line("checkpoint", 1000 * k, save_seconds=62.0 + k)
        made.now += 62 + k
        if k == 3:
            made.now += 900
            made.line("start", 3000, startup_seconds=150)
        made.line("durable", 1000 * k)
    return made


def test_the_ledger_of_a_run(ledger: Ledger) -> None:
    ledger.line("finished", 6000)
    found = measure(read_ledger(ledger.path).events)
    assert (found.save, found.num_saves) == (65.5, 6)
    assert found.step == pytest.approx(2.9) and found.num_stretches == 4  # not across the restart
    assert (found.startup, found.num_startups, found.interval, found.restarts) == (145, 2, 1000, 1)
    # Another layout is another speed: nothing of the old one counts.
    ledger.line("start", 6000, Topology(dp=4), startup_seconds=20)
    for k in (1, 2):
        ledger.now += 100
        ledger.line("checkpoint", 6000 + 10 * k, Topology(dp=4), save_seconds=10)
    found = measure(read_ledger(ledger.path).events)
    assert (found.save, found.startup, found.interval) == (10, 20, 10)
    assert found.step == pytest.approx(9)


def test_lines_as_they_were_before(tmp_path: Path) -> None:
    """Without the time of a start; a commit that the next start finished, without the time of its save."""
    ledger = Ledger(tmp_path)
    ledger.line("start", 0)
    for k, took in ((1, 5.0), (2, None), (3, 5.0), (4, 5.0)):
        ledger.now += 25
        ledger.line("checkpoint", 10 * k, **({} if took is None else {"save_seconds": took}))
    found = measure(read_ledger(ledger.path).events)
    assert (found.save, found.num_saves, found.step, found.num_stretches, found.startup) == (5, 3, 2, 2, None)
    advice = advise(Run(tmp_path), mtbf=3600)
    assert advice.seconds.restart == 0 and advice.save_interval == round(daly(5, 3600) / 2)


def test_a_start_records_how_long_it_took(run: SavedRun) -> None:  # noqa: F811
    start = read_ledger(run.save / "megaresume" / "ledger.jsonl").entries[0]
    age = process_age()
    assert age is not None and 0 < start.details["startup_seconds"] <= age + 0.1 < 36_000


def test_formulas() -> None:
    assert young(50, 10_000) == 1000
    assert daly(50, 10_000) == pytest.approx(1000 * (1 + 0.05 / 3 + 0.0025 / 9) - 50)
    assert daly(300, 100) == 100
    # Daly's is the best of the complete model, to a hundredth of a percent of the day.
    for save, mtbf in ((1, 1e5), (60, 21_600), (600, 21_600), (3000, 10_000)):
        best = daly(save, mtbf)
        rows = losses([round(best * f) for f in (0.5, 0.8, 1, 1.25, 2)], step=1, save=save, restart=0, mtbf=mtbf)
        at = [row.total for row in rows]
        assert min(at) > at[2] - 0.01
        assert at[0] > at[2] and at[4] > at[2]


def test_losses_against_a_simulation() -> None:
    trained, save, restart, mtbf = 1800.0, 120.0, 300.0, 7200.0
    rng = random.Random(5)
    saving = recomputing = restarting = kept = 0.0
    for _ in range(40_000):
        while (failure := rng.expovariate(1 / mtbf)) < trained + save:
            recomputing += failure
            while (again := rng.expovariate(1 / mtbf)) < restart:
                restarting += again
            restarting += restart
        saving, kept = saving + save, kept + trained
    day = 24 / (saving + recomputing + restarting + kept)
    (row,) = losses([900], step=2, save=save, restart=restart, mtbf=mtbf)
    assert row.seconds == trained
    assert row.saving == pytest.approx(saving * day, rel=0.02)
    assert row.recomputing == pytest.approx(recomputing * day, rel=0.02)
    assert row.restarting == pytest.approx(restarting * day, rel=0.02)
    # An interval at which nothing is ever kept is no overflow.
    (row,) = losses([10**9], step=2, save=save, restart=restart, mtbf=mtbf)
    assert row.total == pytest.approx(24, abs=0.01) and math.isfinite(row.total)


def test_what_is_printed(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(ledger.root), "--mtbf", "6h", "--restart-time", "10m"]) == 0
    out = capsys.readouterr().out
    steps = round(daly(65.5, 21_600) / 2.9)
    lines = out.splitlines()
    assert lines[0] == f"save every {steps} steps (27 min 18 s of training); Megatron: --save-interval {steps}"
    assert "a save takes      1 min 6 s  (median of the last 6 saves)" in out
    (best,) = [line.split() for line in lines if line.startswith("  recommended")]
    (now,) = [line.split() for line in lines if line.startswith("  now")]
    assert best[1] == str(steps) and now[1] == "1,000" and float(best[-2]) < float(now[-2])
    assert main(["plan", str(ledger.root), "--mtbf", "6h", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["save_interval"] == steps and report["seconds"]["restart"] == 145
    (row,) = [row for row in report["hours_lost_a_day"] if row["recommended"]]
    assert row["total"] == pytest.approx(row["saving"] + row["recomputing"] + row["restarting"])
    assert row["total"] == min(r["total"] for r in report["hours_lost_a_day"])


def test_too_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path), "--mtbf", "6h"]) == 1
    err = capsys.readouterr().err
    assert "the time of a save and of a step" in err and "--save-time 60s --step-time 3s" in err
    ledger = Ledger(tmp_path)
    ledger.line("checkpoint", 10, save_seconds=4)
    assert main(["plan", str(tmp_path), "--mtbf", "6h"]) == 1
    err = capsys.readouterr().err
    assert "does not record the time of a step\n" in err and "1 timed saves, 0 stretches" in err
    assert main(["plan", str(tmp_path), "--mtbf", "6h", "--step-time", "500ms"]) == 0
    assert capsys.readouterr().out.startswith(f"save every {round(daly(4, 21_600) / 0.5)} steps (")
    assert main(["plan", str(tmp_path), "--step-time", "1s"]) == 2
    assert main(["plan", str(tmp_path / "nowhere"), "--mtbf", "6h"]) == 2
    capsys.readouterr()
    other = ["--dp", "4", "--on-change", "stage", "--skip-samples", "8:16"]
    assert main(["plan", str(tmp_path), "--mtbf", "6h", *other]) == 2
    assert "found: --on-change, --skip, --dp with --mtbf" in " ".join(capsys.readouterr().err.split())
    done = megaresume("plan", tmp_path, "--mtbf", "soon")
    assert done.returncode == 2 and "'soon' is not a time such as 45s, 90m, 6h or 2d" in done.stderr


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90m", 5400), ("6h", 21_600), ("2d", 172_800), ("45", 45), ("1h30m", 5400), ("1.5h", 5400), ("250ms", 0.25)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


def test_no_durations() -> None:
    for text in ("", "6 h", "h", "-5m", "0s", "1e3", "5x", "9" * 400, "40000d"):
        with pytest.raises(argparse.ArgumentTypeError):
            duration(text)
    spelled = [spell(s) for s in (0.0032, 12.46, 59.99, 60, 250, 3600, 5000, 172_800, 180_000)]
    assert spelled == ["3.2 ms", "12.5 s", "60 s", "1 min", "4 min 10 s", "1 h", "1 h 23 min", "2 d", "2 d 2 h"]
