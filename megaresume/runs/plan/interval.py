"""How often to save: from what the ledger recorded of this run, and how often its machines fail.

    ledger      seconds of a save, of a step, of a start     `measure`: medians of the newest layout
      |
    interval    Young's and Daly's formula                   `young`, `daly`
      |
    table       hours a day lost at other intervals          `losses`, Daly's complete model

A save costs time, and so does what was trained since the last one when a failure comes. The best interval grows with
the square root of both the time of a save and the time between failures.

``megaresume plan DIR --mtbf 6h``: how often to save, and what other intervals would cost.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from megaresume.checkpoint.records.ledger import LedgerEntry
from megaresume.render import text_table
from megaresume.runs.answer import Answer, live, plain, told
from megaresume.runs.directory import Run
from megaresume.runs.plan import Flags
from megaresume.stream.errors import StateError, UsageError

#: newest measurements that a median is taken of.
_NEWEST = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The times of a run in its ledger, in the layout of its newest checkpoint; seconds, None if it says nothing."""

    #: the whole of a save, and of how many it is the median.
    save: float | None = None
    num_saves: int = 0
    #: the time of a step without saves, and of how many stretches between checkpoints it is the median.
    step: float | None = None
    num_stretches: int = 0
    #: the time from the beginning of the process to the first step.
    startup: float | None = None
    num_startups: int = 0
    #: steps between checkpoints now.
    interval: int | None = None
    #: starts after the first one, and the seconds from the first line to the last.
    restarts: int = 0
    span: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LostTime:
    """How the hours of a day are spent if checkpoints are saved at one interval."""

    #: steps between saves.
    steps: int
    #: seconds of training between saves.
    seconds: float
    #: the hours of a day spent on saves.
    saving: float
    recomputing: float
    restarting: float

    @told
    def total(self) -> float:
        """Hours of a day that are lost."""
        return self.saving + self.recomputing + self.restarting


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """What an interval is computed from, and what the formulas give: seconds of training between saves."""

    mtbf: float
    save: float
    step: float
    restart: float
    young: float
    daly: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice(Answer):
    """The recommended interval, and what it rests on."""

    root: Path
    #: Daly's, in whole steps.
    save_interval: int
    seconds: Seconds
    #: the times that were given, and not measured.
    given: tuple[str, ...]
    measured: Measured
    #: the intervals from the shortest to the longest; the recommended one and today's among them.
    table: tuple[LostTime, ...] = live()

    @property
    def best(self) -> LostTime:
        """The row of the recommended interval."""
        return next(row for row in self.table if row.steps == self.save_interval)

    @property
    def now(self) -> LostTime | None:
        """The row of the interval that the run has now."""
        return next((row for row in self.table if row.steps == self.measured.interval), None)

    @told
    def hours_lost_a_day(self) -> list[dict[str, Any]]:
        """The table, with what its rows are."""
        return [plain(row) | {"recommended": row is self.best, "now": row is self.now} for row in self.table]


def young(save: float, mtbf: float) -> float:
    """Seconds of training between saves: ``sqrt(2 save mtbf)``.

    J. W. Young, A first order approximation to the optimum checkpoint interval, Communications of the ACM 17 (1974),
    no. 9, 530-531. Good while a save is much shorter than the time between failures.

    Args:
        save: seconds that a save takes.
        mtbf: mean seconds between failures of the whole job.
    """
    return math.sqrt(2 * save * mtbf)


def daly(save: float, mtbf: float) -> float:
    """Seconds of training between saves, to a higher order; also right where saves are long.

    ``sqrt(2 s m) (1 + sqrt(s / 2m) / 3 + (s / 2m) / 9) - s`` for ``s < 2m``, else ``m``.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
    Systems 22 (2006), no. 3, 303-312, equation 37.

    Args:
        save: seconds that a save takes.
        mtbf: mean seconds between failures of the whole job.
    """
    ratio = save / (2 * mtbf)
    if ratio >= 1:
        return mtbf
    return young(save, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def losses(intervals: Sequence[int], *, step: float, save: float, restart: float, mtbf: float) -> tuple[LostTime, ...]:
    """What a day looks like at each interval, in Daly's complete model (2006, equation 20).

    Failures come independently of each other, with the mean ``mtbf``, also in saves and restarts. A stretch of ``t``
    seconds of training and its save take ``m exp(restart / m) (exp((t + save) / m) - 1)`` seconds in the mean.

    Args:
        intervals: steps between saves.
        step: seconds of a step.
        save: seconds of a save.
        restart: seconds from a failure to the first step after it.
        mtbf: mean seconds between failures of the whole job.

    Returns:
        one row for each, hours a day. What is not lost is training that is kept.
    """
    rows = []
    for steps in intervals:
        trained = steps * step
        # The exponentials of a stretch far longer than the time between failures: nothing is ever kept.
        failures = math.expm1(min((trained + save) / mtbf, 600.0))
        waiting = failures * mtbf * math.expm1(min(restart / mtbf, 600.0))
        running = failures * mtbf
        hours = 24 / (running + waiting)
        lost = max(running - trained - save, 0.0)
        row = LostTime(
            steps=steps, seconds=trained, saving=save * hours, recomputing=lost * hours, restarting=waiting * hours
        )
        rows.append(row)
    return tuple(rows)


def measure(events: Sequence[LedgerEntry]) -> Measured:
    """Read times out of a ledger (`LedgerReading.events`). Of what was laid out otherwise than the newest checkpoint
    nothing is taken.

    A step's time is that between two checkpoints of one start, without the first one's save, by the steps between.
    """
    saved = [entry for entry in events if entry.kind == "checkpoint"]
    if not saved:
        return Measured()
    now = saved[-1].topology
    saves: list[float] = []
    stretches: list[float] = []
    steps: list[int] = []
    startups: list[float] = []
    for before, entry in pairwise([None, *events]):
        assert entry is not None
        if entry.topology != now or entry.kind == "finished":
            continue
        if entry.kind == "start":
            startups += [seconds] if (seconds := _seconds(entry, "startup_seconds")) is not None else []
            continue
        seconds = _seconds(entry, "save_seconds")
        saves += [seconds] if seconds is not None else []
        if before is None or before.kind != "checkpoint" or before.topology != now:
            continue
        count, took = entry.iteration - before.iteration, _seconds(before, "save_seconds")
        between = _between(before.time, entry.time)
        if count > 0:
            steps.append(count)
        if count > 0 and took is not None and between is not None and between > took:
            stretches.append((between - took) / count)
    span = _between(events[0].time, events[-1].time)
    return Measured(
        save=_median(saves),
        num_saves=len(saves[-_NEWEST:]),
        step=_median(stretches),
        num_stretches=len(stretches[-_NEWEST:]),
        startup=_median(startups),
        num_startups=len(startups[-_NEWEST:]),
        interval=steps[-1] if steps else None,
        restarts=max(sum(entry.kind == "start" for entry in events) - 1, 0),
        span=max(span or 0.0, 0.0),
    )


def _seconds(entry: LedgerEntry, name: str) -> float | None:
    value = entry.details.get(name)
    return float(value) if isinstance(value, int | float) and value >= 0 else None


def _between(first: str, second: str) -> float | None:
    try:
        return (datetime.fromisoformat(second) - datetime.fromisoformat(first)).total_seconds()
    except (ValueError, TypeError):
        return None


def _median(values: list[float]) -> float | None:
    return median(values[-_NEWEST:]) if values else None


def advise(
    run: Run,
    *,
    mtbf: float,
    save: float | None = None,
    step: float | None = None,
    restart: float | None = None,
) -> Advice:
    """Advise how often a run should save.

    Args:
        run: the run.
        mtbf: mean seconds between failures of the whole job.
        save: seconds of a save, in place of the measured ones. Of an asynchronous save: what it holds training up.
        step: seconds of a step, in place of the measured ones.
        restart: seconds from a failure to the first step after it; None: as long as starts took, without any queue.

    Raises:
        StateError: the ledger has too little, or cannot be read.
    """
    times = {"restart": restart, "save": save, "step": step}
    given = tuple(name for name, value in times.items() if value is not None)
    measured = measure(run.ledger.events)
    save = measured.save if save is None else save
    step = measured.step if step is None else step
    lacking = {"--save-time 60s": save, "--step-time 3s": step}
    if save is None or step is None:
        what = [word for word, value in (("of a save", save), ("of a step", step)) if value is None]
        raise StateError(
            f"the ledger does not record the time {' and '.join(what)}",
            found=f"{run.ledger_path}: {measured.num_saves} timed saves, {measured.num_stretches} stretches between "
            "two checkpoints of one start, in the layout of the newest checkpoint",
            expected="at least two checkpoints, saved one after the other by one start",
            cause=None if run.ledger_path.exists() else "nothing was saved here under megaresume",
            action="train on to the second save, or give what is known: "
            + " ".join(flag for flag, value in lacking.items() if value is None),
        )
    restart = (measured.startup or 0.0) if restart is None else restart
    # Below a millisecond nothing was measured: a formula of it would be noise.
    save, step = max(save, 1e-3), max(step, 1e-6)
    seconds = daly(save, mtbf)
    steps = max(1, round(seconds / step))
    wanted = {max(1, round(steps * factor)) for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)}
    wanted |= {measured.interval} if measured.interval else set()
    return Advice(
        root=run.root,
        save_interval=steps,
        seconds=Seconds(mtbf=mtbf, save=save, step=step, restart=restart, young=young(save, mtbf), daly=seconds),
        given=given,
        measured=measured,
        table=losses(sorted(wanted), step=step, save=save, restart=restart, mtbf=mtbf),
    )


_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
#: seconds; above it nobody means it.
_LONGEST = 100 * 365 * 86_400.0
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|min|[smhd]))+|[0-9]+(?:\.[0-9]+)?")


def duration(text: str) -> float:
    """``90m``, ``6h``, ``2d``, ``1h30m``, ``45`` (seconds) as seconds.

    Raises:
        argparse.ArgumentTypeError: it is not a time.
    """
    if not _DURATION.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 45s, 90m, 6h or 2d")
    parts = re.findall(r"([0-9.]+)(ms|min|[smhd]|)", text)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not 0 < seconds <= _LONGEST:
        raise argparse.ArgumentTypeError(f"{text:.40} is not more than 0 and at most 100 years")
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``plan`` that ask for an interval."""
    how = parser.add_argument_group("how often to save (instead of a dry run)")
    how.add_argument(
        "--mtbf", type=duration, metavar="TIME", help="mean time between failures of the whole job: 90m, 6h, 2d"
    )
    how.add_argument("--save-time", type=duration, metavar="TIME", help="time of a save (default: from the ledger)")
    how.add_argument("--step-time", type=duration, metavar="TIME", help="time of a step (default: from the ledger)")
    how.add_argument(
        "--restart-time",
        type=duration,
        metavar="TIME",
        help="from a failure to the first step after it (default: the time of past starts, without a queue)",
    )


def is_asked(args: argparse.Namespace) -> bool:
    """Whether the flags ask for an interval rather than a dry run."""
    return any(value is not None for value in (args.mtbf, args.save_time, args.step_time, args.restart_time))


def run(args: argparse.Namespace, flags: Flags) -> int:
    """Recommend an interval. Returns 0.

    Args:
        args: of this part.
        flags: of the dry run, which this is not.

    Raises:
        UsageError: a time without ``--mtbf``, or flags of the dry run.
    """
    if args.mtbf is None:
        raise UsageError("a time was given without --mtbf", expected="--mtbf TIME as well", action="--mtbf 6h")
    unused = [f"--{one.name.replace('_', '-')}" for one in fields(flags) if getattr(flags, one.name) != one.default]
    if unused:
        raise UsageError(
            "--mtbf says how often to save, from what the ledger recorded; it is not a dry run with other flags",
            found=f"{', '.join(unused)} with --mtbf",
            action="one command for each; for another layout, its --save-time and --step-time with --mtbf",
        )
    advice = advise(Run(args.dir), mtbf=args.mtbf, save=args.save_time, step=args.step_time, restart=args.restart_time)
    return advice.give(_text, as_json=args.json)


def _text(advice: Advice) -> str:
    best, measured, seconds, given = advice.best, advice.measured, advice.seconds, advice.given
    lines = [
        f"save every {advice.save_interval} steps ({spell(best.seconds)} of training); "
        f"Megatron: --save-interval {advice.save_interval}",
        "",
        "from",
        f"  a failure every   {spell(seconds.mtbf)}",
        f"  a save takes      {spell(seconds.save)}  ({_source('save', measured.num_saves, 'saves', given)})",
        f"  a step takes      {spell(seconds.step)}  ({_source('step', measured.num_stretches, 'stretches', given)})",
        f"  a restart takes   {spell(seconds.restart)}  ({_restart(advice, given)})",
        f"  Young's formula   {spell(seconds.young)}",
        f"  Daly's formula    {spell(seconds.daly)}",
        "",
        "hours lost a day",
    ]
    rows = [["", "steps", "interval", "saving", "trained again", "restarting", "lost", "training"]]
    for row in advice.table:
        mark = "recommended" if row is best else "now" if row is advice.now else ""
        if row is best and row is advice.now:
            mark = "recommended, now"
        hours = [f"{value:.2f}" for value in (row.saving, row.recomputing, row.restarting, row.total)]
        rows.append([mark, f"{row.steps:,}", spell(row.seconds), *hours, f"{1 - row.total / 24:.1%}"])
    lines.append(text_table(rows))
    if measured.restarts:
        lines += [
            "",
            f"the ledger has {measured.restarts} restart{'s' * (measured.restarts > 1)} in {spell(measured.span)}",
        ]
    return "\n".join(lines)


def _source(name: str, count: int, what: str, given: Sequence[str]) -> str:
    if name in given:
        return f"--{name}-time"
    return f"median of the last {count} {what}" if count > 1 else f"of the only one of the {what}"


def _restart(advice: Advice, given: Sequence[str]) -> str:
    if "restart" in given:
        return "--restart-time"
    if advice.measured.startup is None:
        return "not recorded: give --restart-time"
    count = advice.measured.num_startups
    return f"without any queue; median of {count} starts" if count > 1 else "without any queue; of one start"


def spell(seconds: float) -> str:
    """``1 h 23 min``, ``4 min 10 s``, ``12.5 s``, ``3.2 ms``."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"
