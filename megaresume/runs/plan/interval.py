"""How often to save: by the times that the ledger recorded for this run, and how often its machines fail.

    ledger      seconds of a save, of a step, of a start     `measure`: medians of the newest layout
      |
    interval    Young's and Daly's formula                   `young`, `daly`
      |
    table       hours a day lost at other intervals          `losses`, Daly's complete model

A save costs time, and so does repeating what was trained since the last save when a failure comes. The best interval
grows with the square root of both the duration of a save and the time between failures.

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

#: number of newest measurements for a median.
_NEWEST = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Times in a run's ledger, for the layout of its newest checkpoint; in seconds, None if unknown."""

    #: the duration of a save, and the number of saves behind this median.
    save: float | None = None
    num_saves: int = 0
    #: the duration of a step without saves, and the number of stretches between checkpoints behind this median.
    step: float | None = None
    num_stretches: int = 0
    #: the time from the start of the process to the first step.
    startup: float | None = None
    num_startups: int = 0
    #: current number of steps between checkpoints.
    interval: int | None = None
    #: starts after the first one, and the seconds from the first line to the last.
    restarts: int = 0
    span: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LostTime:
    """The hours of a day at one save interval."""

    #: steps between saves.
    steps: int
    #: seconds of training between saves.
    seconds: float
    #: hours per day spent on saves.
    saving: float
    recomputing: float
    restarting: float

    @told
    def total(self) -> float:
        """Hours lost per day."""
        return self.saving + self.recomputing + self.restarting


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """What the interval is computed from, and the results of the formulas: seconds of training between saves."""

    mtbf: float
    save: float
    step: float
    restart: float
    young: float
    daly: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice(Answer):
    """The recommended interval, and its basis."""

    root: Path
    #: Daly's interval, in whole steps.
    save_interval: int
    seconds: Seconds
    #: the times that were given instead of measured.
    given: tuple[str, ...]
    measured: Measured
    #: the intervals from shortest to longest, including the recommended and the current one.
    table: tuple[LostTime, ...] = live()

    @property
    def best(self) -> LostTime:
        """The row of the recommended interval."""
        return next(row for row in self.table if row.steps == self.save_interval)

    @property
    def now(self) -> LostTime | None:
        """The row of the run's current interval."""
        return next((row for row in self.table if row.steps == self.measured.interval), None)

    @told
    def hours_lost_a_day(self) -> list[dict[str, Any]]:
        """The table as JSON, with the roles of its rows."""
        return [plain(row) | {"recommended": row is self.best, "now": row is self.now} for row in self.table]


def young(save: float, mtbf: float) -> float:
    """Seconds of training between saves: ``sqrt(2 save mtbf)``.

    J. W. Young, A first order approximation to the optimum checkpoint interval, Communications of the ACM 17 (1974),
    no. 9, 530-531. Accurate if a save is much shorter than the time between failures.

    Args:
        save: duration of a save, in seconds.
        mtbf: mean seconds between failures of the whole job.
    """
    return math.sqrt(2 * save * mtbf)


def daly(save: float, mtbf: float) -> float:
    """Seconds of training between saves, to a higher order; also accurate for long saves.

    ``sqrt(2 s m) (1 + sqrt(s / 2m) / 3 + (s / 2m) / 9) - s`` for ``s < 2m``, else ``m``.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
    Systems 22 (2006), no. 3, 303-312, equation 37.

    Args:
        save: duration of a save, in seconds.
        mtbf: mean seconds between failures of the whole job.
    """
    ratio = save / (2 * mtbf)
    if ratio >= 1:
        return mtbf
    return young(save, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def losses(intervals: Sequence[int], *, step: float, save: float, restart: float, mtbf: float) -> tuple[LostTime, ...]:
    """The hours of a day at each interval, by Daly's complete model (2006, equation 20).

    Failures are independent of each other, with mean ``mtbf``, also during saves and restarts. ``t`` seconds of
    training and their save take ``m exp(restart / m) (exp((t + save) / m) - 1)`` seconds on average.

    Args:
        intervals: steps between saves.
        step: duration of a step, in seconds.
        save: duration of a save, in seconds.
        restart: seconds from a failure to the first step after it.
        mtbf: mean seconds between failures of the whole job.

    Returns:
        one row for each, in hours per day. Time that is not lost is training that is kept.
    """
    rows = []
    for steps in intervals:
        trained = steps * step
        # Limits the exponential: with stretches far longer than the time between failures, nothing is ever kept.
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
    """Read times from a ledger (`LedgerReading.events`), only from checkpoints with the newest one's layout.

    A step's duration is the time between two checkpoints of one start, minus the first one's save, divided by the steps
    between them.
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
        save: duration of a save in seconds, instead of the measured one. For asynchronous saves: how long training
            waits.
        step: duration of a step in seconds, instead of the measured one.
        restart: seconds from a failure to the first step after it; None: as long as past starts took, without queueing.

    Raises:
        StateError: the ledger has too little data, or cannot be read.
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
    # Shorter times are measurement noise.
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
#: seconds; a longer time must be a mistake.
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
    """Flags of ``plan`` for the save interval."""
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
    """Whether the flags ask for a save interval rather than a dry run."""
    return any(value is not None for value in (args.mtbf, args.save_time, args.step_time, args.restart_time))


def run(args: argparse.Namespace, flags: Flags) -> int:
    """Recommend an interval. Returns 0.

    Args:
        args: the parsed flags of this module.
        flags: flags of the dry run, which must not be set.

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
