"""``megaresume doctor [DIR] [--log FILE]``: what may be wrong, with what it means and what to do.

Neither torch nor DeepSpeed nor Megatron is imported, and nothing is ever unpickled.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from megaresume.checkpoint.foreign import LAYOUTS
from megaresume.command_line import at_least
from megaresume.render import byte_bar
from megaresume.runs.answer import Answer, told
from megaresume.runs.doctor import Check
from megaresume.runs.doctor.directory import directory_checks
from megaresume.runs.doctor.log import first_failure, log_checks
from megaresume.runs.doctor.machine import environment_checks, filesystem_checks
from megaresume.runs.run import Run
from megaresume.stream.errors import UsageError

_WORDS = {"problem": "PROBLEM", "warning": "warning", "note": "note", "ok": "ok"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("dir", metavar="DIR", type=Path, nargs="?", help="a directory of checkpoints (default: none)")
    parser.add_argument(
        "--log", metavar="FILE", type=Path, action="append", default=[], help="log of a launch; repeatable"
    )
    parser.add_argument("--layout", choices=tuple(LAYOUTS), help="whose checkpoints (default: recognised)")
    parser.add_argument(
        "--dp", type=at_least(1), metavar="N", help="data-parallel size of the next launch: can it load DIR?"
    )
    parser.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), metavar="Z", help="its ZeRO stage")
    parser.add_argument(
        "--last", type=at_least(0), default=5, metavar="N", help="checkpoints to check, newest first (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Look; 1 if there is a problem."""
    return Diagnosis(_checks(args)).give(_text, as_json=args.json)


@dataclass(frozen=True, slots=True)
class Diagnosis(Answer):
    """All that was looked at."""

    checks: list[Check]

    @told
    def problems(self) -> int:
        """How many."""
        return sum(check.status == "problem" for check in self.checks)

    @property
    def status(self) -> int:
        """1 if there is a problem."""
        return 1 if self.problems else 0


def _checks(args: argparse.Namespace) -> list[Check]:
    if args.dir is None and (args.dp is not None or args.zero_stage is not None):
        raise UsageError("--dp and --zero-stage ask about a checkpoint", expected="DIR", action="megaresume doctor DIR")
    checks = environment_checks()
    if args.dir is not None:
        layout = LAYOUTS.get(args.layout)
        found = directory_checks(Run(args.dir), layout, dp=args.dp, zero_stage=args.zero_stage, last=args.last)
        checks += filesystem_checks(args.dir, found.size, found.num_files) + found.checks
    if args.log:
        for path in args.log:
            with byte_bar(path.name, path.stat().st_size if path.is_file() else None) as progress:
                checks += log_checks(path, progress)
        checks += first_failure(args.log)
    return checks


def _text(found: Diagnosis) -> str:
    checks = found.checks
    lines: list[str] = []
    area = None
    width = max(len(check.name) for check in checks if check.area != "log")
    for check in checks:
        if check.area != area:
            area = check.area
            lines += ["", area] if lines else [area]
        name = check.name.ljust(width) if area != "log" else f"{check.name}:"
        lines.append(f"  {_WORDS[check.status]:<8} {name}  {check.found}".replace("\n", "\n  "))
        if check.cause is not None:
            lines.append(f"             meaning:      {check.cause}")
        if check.action is not None:
            lines.append(f"             next action:  {check.action}")
    counts = {status: sum(check.status == status for check in checks) for status in ("problem", "warning")}
    ends = [f"{count} {word}{'s' * (count != 1)}" for word, count in counts.items() if count]
    return "\n".join([*lines, "", " and ".join(ends) or "nothing is wrong"])
