"""``python -m benchmarks``: run the benchmarks on one core and print the table."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

#: In the order of the table.
NAMES = (
    "planning",
    "packing",
    "diversity",
    "balance",
    "steps",
    "assembly",
    "loader",
    "device",
    "tokens",
    "items",
    "hosts",
    "first_step",
    "prompts",
    "megatron",
    "guard",
    "resume",
    "fingerprint",
    "state",
    "memory",
    "scale",
    "simulation",
    "saving",
    "staging",
    "metrics",
    "vlm",
    "far",
    "store",
    "cold",
    "prepare",
    "cli",
)


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 if something must hold and does not; with ``--quick`` nothing is judged."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", action="append", choices=NAMES, metavar="NAME", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: times mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    parser.add_argument("--directory", type=Path, help="where to put 6 GB of temporary files")
    args = parser.parse_args(argv)
    cores = one_core()

    from benchmarks.machine import machine
    from benchmarks.setup import FULL, QUICK, Setup
    from benchmarks.table import Row, markdown

    about = machine(cores)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="megaresume-benchmarks-", dir=args.directory) as directory:
        # Fingerprints of the synthetic corpora go with them.
        os.environ["MEGARESUME_CACHE"] = directory
        setup = Setup(Path(directory), QUICK if args.quick else FULL, cores)
        for name in [name for name in NAMES if name in (args.only or NAMES)]:
            print(f"benchmarks: {name}", file=sys.stderr, flush=True)
            rows += importlib.import_module(f"benchmarks.{name}").rows(setup)
    print(", ".join(f"{key} {value}" for key, value in about.items()) + "\n")
    print(markdown(rows, judge=not args.quick))
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": about, "quick": args.quick, "rows": [asdict(r) for r in rows]}))
    return 1 if not args.quick and any(row.holds is False for row in rows) else 0


def one_core() -> set[int]:
    """Keep this process on one core, one thread a library; returns the cores that it could have used."""
    # Libraries read these when they are imported.
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    if not hasattr(os, "sched_setaffinity"):  # macOS, Windows
        return set(range(os.cpu_count() or 1))
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    return cores


if __name__ == "__main__":
    sys.exit(main())
