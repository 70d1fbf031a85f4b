"""``megaresume plan DIR --mtbf 6h``: how often to save, and what other intervals would cost."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, fields
from typing import Any

from megaresume.dryrun import Flags
from megaresume.render import text_table
from megaresume.runs.interval import Advice, advise
from megaresume.runs.run import Run
from megaresume.stream.errors import UsageError

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
#: seconds; above it nobody means it.
_LONGEST = 100 * 365 * 86_400.0
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|min|[smhd]))+|[0-9]+(?:\.[0-9]+)?")


def duration(text: str) -> float:
    """``90m``, ``6h``, ``2d``, ``1h30m``, ``45`` (seconds) as seconds.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not _DURATION.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 45s, 90m, 6h or 2d")
    parts = re.findall(r"([0-9.]+)(ms|min|[smhd]|)", text)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not 0 < seconds <= _LONGEST:
        raise argparse.ArgumentTypeError(f"{text:.40} is not more than 0 and at most 100 years")
    return seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this part of ``plan``."""
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
    """Whether this is wanted, and not a dry run."""
    return any(value is not None for value in (args.mtbf, args.save_time, args.step_time, args.restart_time))


def run(args: argparse.Namespace, flags: Flags) -> int:
    """Recommend an interval; always 0.

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
            "--mtbf says how often to save, from what the ledger recorded; it is no dry run with other flags",
            found=f"{', '.join(unused)} with --mtbf",
            action="one command for each; for another layout, its --save-time and --step-time with --mtbf",
        )
    advice = advise(Run(args.dir), mtbf=args.mtbf, save=args.save_time, step=args.step_time, restart=args.restart_time)
    given = {name for name in ("save", "step", "restart") if getattr(args, f"{name}_time") is not None}
    print(json.dumps(_report(advice, given)) if args.json else _text(advice, given))
    return 0


def _report(advice: Advice, given: set[str]) -> dict[str, Any]:
    return {
        "root": str(advice.root),
        "save_interval": advice.steps,
        "seconds": {
            "mtbf": advice.mtbf,
            "save": advice.save,
            "step": advice.step,
            "restart": advice.restart,
            "young": advice.young,
            "daly": advice.daly,
        },
        "given": sorted(given),
        "measured": asdict(advice.measured),
        "hours_lost_a_day": [
            {**asdict(row), "total": row.total, "recommended": row is advice.best, "now": row is advice.now}
            for row in advice.table
        ],
    }


def _text(advice: Advice, given: set[str]) -> str:
    best, measured = advice.best, advice.measured
    lines = [
        f"--save-interval {advice.steps}: save every {spell(best.seconds)} of training",
        "",
        "from",
        f"  a failure every   {spell(advice.mtbf)}",
        f"  a save takes      {spell(advice.save)}  ({_source('save', measured.num_saves, 'saves', given)})",
        f"  a step takes      {spell(advice.step)}  ({_source('step', measured.num_stretches, 'stretches', given)})",
        f"  a restart takes   {spell(advice.restart)}  ({_restart(advice, given)})",
        f"  Young's formula   {spell(advice.young)}",
        f"  Daly's formula    {spell(advice.daly)}",
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


def _source(name: str, count: int, what: str, given: set[str]) -> str:
    if name in given:
        return f"--{name}-time"
    return f"median of the last {count} {what}" if count > 1 else f"of the only one of the {what}"


def _restart(advice: Advice, given: set[str]) -> str:
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
