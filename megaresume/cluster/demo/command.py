"""``megaresume demo``: the main job end to end on this machine, killed and resumed, with proof."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megaresume.command_line import need_packages
from megaresume.stream.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--out", metavar="DIR", type=Path, help="default: demo-run, demo-sft, demo-vlm or demo-trainer")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--trainer", action="store_true", help="Hugging Face's Trainer and a small Llama")
    kind.add_argument("--sft", action="store_true", help="conversations in one blend with text; masks token by token")
    kind.add_argument("--vlm", action="store_true", help="images of digits with text, and a model that reads them")
    parser.add_argument(
        "--steps", type=int, help="steps of the run (default 100; 300 with --vlm, 60 with --sft, --trainer)"
    )
    parser.add_argument("--overwrite", action="store_true", help="remove what an earlier demo left in DIR")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    if args.steps is not None and args.steps < 24:
        raise UsageError(
            "too few steps",
            found=f"--steps {args.steps}",
            expected="at least 24, so that both kills follow a checkpoint",
        )
    if args.trainer:
        needed = ("torch", "transformers", "accelerate", "matplotlib")
        need_packages("the demo", needed, extra="hugging-face,report")
    else:
        more = ("PIL", "sklearn") if args.vlm else ("tokenizers", "jinja2") if args.sft else ()
        needed = ("torch", "deepspeed", "megatron.core", "matplotlib", *more)
        need_packages("the demo", needed, extra="demo")
    from megaresume.cluster.demo.run import run_demo

    if args.trainer:
        from megaresume.cluster.demo.hugging_face import TRAINER as scenario
    elif args.sft:
        from megaresume.cluster.demo.sft import SFT as scenario
    elif args.vlm:
        from megaresume.cluster.demo.vlm import VLM as scenario
    else:
        from megaresume.cluster.demo.text import TEXT as scenario
    named = next((name for name in ("trainer", "sft", "vlm") if getattr(args, name)), "run")
    out = args.out or Path(f"demo-{named}")
    result = run_demo(scenario, out, steps=args.steps or scenario.steps, overwrite=args.overwrite, quiet=args.json)
    if args.json:
        print(json.dumps(result))
    return 0 if result["holds"] else 1
