"""``megaresume convert DIR``: a ZeRO checkpoint for any number of data-parallel ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaresume.command_line import at_least
from megaresume.hosts.deepspeed.elastic.conversion import Reporter, convert, read_universal
from megaresume.hosts.deepspeed.elastic.load_rules import choose_to_load
from megaresume.stream.errors import CheckpointError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.description = (
        f"{parser.description}. It unpickles the checkpoint's files, as DeepSpeed does: convert only what you trust"
    )
    parser.add_argument("dir", metavar="DIR", type=Path, help="the run's --save directory")
    parser.add_argument("--tag", help="the checkpoint, such as global_step100 (default: what a start would take)")
    parser.add_argument("--workers", type=at_least(1), metavar="N", help="processes (default: by size and cores)")


def run(args: argparse.Namespace) -> int:
    """Convert, or find it converted."""
    if not args.dir.is_dir():
        raise UsageError("no such directory", found=str(args.dir), expected="the --save directory of a run")
    choice = choose_to_load(args.dir, args.tag, False, checksums=True)
    if choice is None:
        raise CheckpointError(f"there is no checkpoint in {args.dir}")
    if choice.step is None:
        raise UsageError(
            "only checkpoints with records of megaresume are converted",
            found=f"{choice.tag_dir}, written without megaresume",
            action="python -m deepspeed.checkpoint.ds_to_universal --help, and load_universal",
        )
    if not choice.step.topology.zero_stage:
        raise UsageError(
            "this checkpoint needs no conversion",
            found=f"{choice.tag}, saved without ZeRO",
            expected="ZeRO 1, 2 or 3; without it any number of ranks loads the checkpoint",
        )
    save_id = choice.step.save_id
    done = read_universal(choice.tag_dir, save_id, checksums=True)
    if done is None:
        report = Reporter(say=lambda words: print(words, flush=True))
        done = convert(choice.tag_dir, save_id=save_id, made_by="command", report=report, workers=args.workers)
    print(f"{done.path} can be loaded by any number of data-parallel ranks: start the run as usual")
    return 0
