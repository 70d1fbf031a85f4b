"""``megaresume demo``: the main job end to end on this machine, killed and resumed, with proof."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megaresume.stream.errors import SetupError, UsageError

HELP = "train, kill -9, resume on another topology, and prove that nothing was repeated or skipped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("demo-run"), help="default: demo-run")
    parser.add_argument("--steps", type=int, default=100, help="steps of the run (default 100)")
    parser.add_argument("--overwrite", action="store_true", help="remove what an earlier demo left in DIR")
    parser.add_argument("--json", action="store_true", help="the result as JSON on standard output")


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    if args.steps < 24:
        raise UsageError(
            "too few steps",
            found=f"--steps {args.steps}",
            expected="at least 24, so that both kills follow a checkpoint",
        )
    _check_packages()
    from megaresume.training.demo.run import run_demo

    result = run_demo(args.out, steps=args.steps, overwrite=args.overwrite, quiet=args.json)
    if args.json:
        print(json.dumps(result))
    return 0 if result["holds"] else 1


def _check_packages() -> None:
    import importlib.util

    needed = ("torch", "deepspeed", "megatron.core", "matplotlib", "psutil")
    missing = [name for name in needed if importlib.util.find_spec(name.partition(".")[0]) is None]
    if missing:
        raise SetupError(
            "the demo needs packages that are not installed",
            found=f"no {', '.join(missing)}",
            action="pip install 'megaresume[demo]', or make demo in a clone",
        )
