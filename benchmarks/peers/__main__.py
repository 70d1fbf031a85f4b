"""``python -m benchmarks.peers``: kill and resume each loader, and write what it lost. Half an hour on two cores."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import megaresume
from benchmarks.peers.launch import ROOT, scratch
from benchmarks.peers.measure import measure
from benchmarks.peers.page import write_tables
from benchmarks.peers.scenario import kill_steps
from benchmarks.peers.tools import TOOLS


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 if megaresume repeated or left out a sample."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--only", action="append", choices=tuple(TOOLS), help="a tool; others keep their results")
    parser.add_argument("--kills", type=int, default=3, help="random steps at which each run is killed (default: 3)")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="ENVIRONMENT=PATH",
        help="interpreter of an environment, main or mosaicml (default: this one)",
    )
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "peers.json", help="the results")
    parser.add_argument("--tables-only", action="store_true", help="write the tables of the results that there are")
    args = parser.parse_args(argv)
    pythons = dict(word.split("=", 1) for word in args.python)
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    for name in () if args.tables_only else args.only or TOOLS:
        python = pythons.get(TOOLS[name].environment, sys.executable)
        with scratch() as directory:
            result = measure(name, python, Path(directory), kill_steps(args.kills))
        if name == "megaresume":
            result["versions"] = {"megaresume": megaresume.__version__, **result["versions"]}
        results[name] = result
        ordered = {name: results[name] for name in TOOLS if name in results}
        args.json.write_text(json.dumps(ordered, indent=1) + "\n")
    write_tables(results)
    ours = [one for some in results.get("megaresume", {"changes": {}})["changes"].values() for one in some]
    return 0 if all(one.get("repeated") == one.get("never") == 0 for one in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
