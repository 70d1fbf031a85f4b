"""``megaresume report DIR``: what became of a run, as one HTML page, from the records beside its checkpoints."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megaresume.runs.losses import read_losses
from megaresume.runs.report import collect
from megaresume.runs.report_page import run_page
from megaresume.runs.run import Run
from megaresume.stream.errors import SetupError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("dir", metavar="DIR", type=Path, help="the run's --save directory")
    parser.add_argument(
        "--log",
        metavar="FILE",
        type=Path,
        help="the run's losses: from --megaresume-log-samples, or printed by Megatron-LM or DeepSpeed",
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="where the page goes (default: report.html in DIR)")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON, write no page")


def run(args: argparse.Namespace) -> int:
    """Write the page."""
    facts = collect(Run(args.dir), None if args.log is None else read_losses(args.log))
    if args.json:
        print(json.dumps(facts))
        return 0
    output = args.output or args.dir / "report.html"
    try:
        output.write_text(run_page(facts), encoding="utf-8")
    except OSError as error:
        raise SetupError(
            f"cannot write {output}", found=error.strerror or str(error), action="--output ANOTHER"
        ) from error
    print(f"report: {output}")
    return 0
