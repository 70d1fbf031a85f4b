"""``megaresume latest DIR``: the path of the newest complete checkpoint, alone on standard output, for launch scripts.

Why newer ones were not taken goes to standard error. Neither torch nor numpy is imported, nothing is unpickled.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaresume.checkpoint.foreign import LAYOUTS
from megaresume.render import write_bytes
from megaresume.runs.newest import Newest, find_newest
from megaresume.runs.run import Run
from megaresume.stream.errors import CheckpointError, MegaresumeError, UsageError
from megaresume.stream.text import visible


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("dir", metavar="DIR", type=Path, help="a directory of checkpoints")
    parser.add_argument("--layout", choices=tuple(LAYOUTS), help="whose checkpoints (default: recognised)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--tag", action="store_true", help="print only the directory's name")
    what.add_argument("--iteration", action="store_true", help="print only the iteration")
    what.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--allow-none",
        action="store_true",
        help="if there is no checkpoint at all, print nothing and exit with 0: for the first start of a run",
    )


def run(args: argparse.Namespace) -> int:
    """Print it; 1 if there is none."""
    try:
        found = find_newest(Run(args.dir), LAYOUTS.get(args.layout)) if args.dir.exists() else None
        if found is None or found.path is None:
            return _none(args, found)
    except UsageError:
        raise
    except MegaresumeError as error:
        if args.json:
            print(json.dumps({"path": None, "error": str(error)}))
        raise
    for rejected in found.passed:
        print(f"megaresume: not {visible(str(rejected))}", file=sys.stderr)
    for note in found.notes:
        print(f"megaresume: {visible(note)}", file=sys.stderr)
    if args.json:
        print(json.dumps(_report(found)))
    elif args.tag:
        print(found.path.name)
    elif args.iteration:
        if found.iteration is None:
            raise CheckpointError(
                "the newest complete checkpoint has no iteration",
                found=str(found.path),
                expected="a directory whose name or content tells one",
                action="print its path or its name: --tag",
            )
        print(found.iteration)
    else:
        write_bytes(os.fsencode(found.path) + b"\n")  # a path is bytes: scripts get them as they are
    return 0


def _none(args: argparse.Namespace, found: Newest | None) -> int:
    if args.json:
        print(json.dumps({"path": None, "error": None}))
    if args.allow_none:
        for note in () if found is None else found.notes:
            print(f"megaresume: {visible(note)}", file=sys.stderr)
        return 0
    error = CheckpointError(
        "there is no checkpoint",
        found=f"no such directory: {args.dir}" if not args.dir.exists() else f"none in {args.dir}",
        expected="iter_*, global_step*, global_step_* or checkpoint-* directories",
        cause="the run has not saved yet, or saves elsewhere",
        action="check the path; for the first start of a run, --allow-none prints nothing and exits with 0",
    )
    print(f"megaresume: error: {error}", file=sys.stderr)
    return 1


def _report(found: Newest) -> dict[str, Any]:
    return {
        "path": str(found.path),
        "tag": None if found.path is None else found.path.name,
        "iteration": found.iteration,
        "layout": found.layout.name,
        "by": "manifest" if found.has_manifest else "files",
        "passed_over": [asdict(rejected) for rejected in found.passed],
        "notes": list(found.notes),
        "error": None,
    }
