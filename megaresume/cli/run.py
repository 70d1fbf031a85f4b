"""``megaresume run SCRIPT ARGS``: run an unmodified training script with the hooks installed."""

from __future__ import annotations

import argparse

HELP = "run an unmodified Megatron script with exact data resume"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `megaresume --help` knows of the command; its own words are split by `megaresume.run`."""
    parser.add_argument("script", help="the training script, or -m MODULE")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its flags, passed on unchanged")


def run(args: argparse.Namespace) -> int:
    """Run the script in this process."""
    from megaresume.run import main  # deferred: only this command needs it

    return main([args.script, *args.args])
