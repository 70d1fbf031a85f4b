"""``megaresume import-energon``: a run on Energon's loader goes over to a stream, at its position."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megaresume.hosts.loaders.energon_import import Imported, factory_of, import_energon, read_states


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "states",
        nargs="+",
        type=Path,
        metavar="STATE",
        help="the files of all data-parallel ranks in their order (train_dataloader_dprank*.pt), or one with all; or "
        "the --save directory of a run with megaresume.attach. They are unpickled",
    )
    parser.add_argument(
        "--loader",
        required=True,
        metavar="MODULE:FUNCTION",
        help="makes the loader like the training script: (rank, world_size, num_workers) -> get_savable_loader(...)",
    )
    parser.add_argument(
        "--data", required=True, type=Path, metavar="DATA.yaml", help="the data config to continue with"
    )
    parser.add_argument("--source", required=True, metavar="NAME", help="its source that is the loader's dataset")
    parser.add_argument(
        "--output", required=True, type=Path, metavar="NEW.yaml", help="where to write the config with the position"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Import; 1 if the stream does not go on exactly where Energon stood."""
    states = read_states(args.states)
    factory = factory_of(args.loader)
    found = import_energon(states, factory, data=args.data, source=args.source, output=args.output)
    report = _report(found, args.source)
    print(json.dumps(report) if args.json else _text(report))
    return 0 if found.exact else 1


def _report(found: Imported, source: str) -> dict[str, Any]:
    return {
        "exact": found.exact,
        "inexact": list(found.position.inexact),
        "source": source,
        "epoch": found.position.epoch,
        "records": found.position.records,
        "handed_out": found.handed,
        "left": found.left,
        "config": str(found.config),
        "documents": None if found.documents is None else str(found.documents),
    }


def _text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['source']}: epoch {report['epoch']} of Energon, {report['handed_out']:,} of {report['records']:,} "
        f"records handed out, {report['left']:,} left: epoch 0 of the stream is those",
        f"written: {report['config']}" + (f" and {report['documents']}" if report["documents"] else ""),
    ]
    if report["exact"]:
        return "\n".join([*lines, "exact: every record of the epoch comes once, from Energon or from the stream"])
    return "\n".join([*lines, "NOT EXACT:", *(f"  {sentence}" for sentence in report["inexact"])])
