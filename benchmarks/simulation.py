"""A million steps of preemptions and size changes on 24 nodes and 4,096 ranks: ids and lengths only, no training.

    python -m benchmarks.simulation                    # a million steps: about ten minutes on one core
    python -m benchmarks.simulation --steps 2000       # seconds
    python -m benchmarks --only simulation             # a short run, and what planning costs by the number of ranks

Exit status 1, with the first difference, if anything was repeated, skipped or handed out in another order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.setup import Setup
from benchmarks.simulated_cluster import Attempt, script
from benchmarks.simulated_documents import Wrong
from benchmarks.simulated_run import Outcome, SimulatedRun
from benchmarks.table import Row

NUM_DOCUMENTS = {"web": 24_000, "code": 12_000, "books": 8_000}
SEQ_LENGTH = 1024
#: Ranks, all of them data-parallel, and samples of a step, for the cost of planning.
RANKS = (1, 8, 64, 512, 4096)
STEP_SAMPLES = 4096
#: Lines of the script of events that are printed from its start and its end.
HEAD, TAIL = 24, 6
COLUMNS = ("attempt", "steps", "ended by", "lost", "nodes", "ranks", "TP x PP x DP", "micro", "global", "from here on")


@dataclass(slots=True)
class Summary:
    """What the simulation saw."""

    steps: int = 0
    samples: int = 0
    micro_batches: int = 0
    documents: int = 0
    epochs: list[int] = field(default_factory=list)
    lost: int = 0
    events: list[tuple[Attempt, Outcome]] = field(default_factory=list)


def simulate(steps: int, *, seed: int = 7) -> Summary:
    """Run the script until so many steps are trained for good.

    Raises:
        Wrong: the data did not resume exactly.
    """
    from benchmarks.corpora import document_lengths
    from benchmarks.lengths import LengthsOnDisk
    from megaresume.stream.config import StreamConfig
    from megaresume.stream.progress import progress

    sources = [LengthsOnDisk(document_lengths(n, seed=k)) for k, n in enumerate(NUM_DOCUMENTS.values())]
    config = StreamConfig.from_dict(
        {
            "seed": seed,
            "seq_length": SEQ_LENGTH,
            "packing": {"mode": "best_fit", "open_bins": 16},
            "sources": {name: {"weight": w} for name, w in zip(NUM_DOCUMENTS, (5, 3, 2), strict=True)},
        }
    )
    run, summary = SimulatedRun(config, sources), Summary()
    with progress("simulating", steps, "steps") as advance:
        high = 0
        for attempt in script(steps, seed=seed, num_sources=len(sources)):
            outcome = run.attempt(attempt, most=steps)
            summary.events.append((attempt, outcome))
            summary.lost += outcome.lost
            advance(max(run.step - high, 0))
            high = max(high, run.step)
            if run.step >= steps:
                break
    with progress("comparing with an uninterrupted stream", run.position, "samples") as advance:
        run.finish(advance)
    summary.steps, summary.samples, summary.micro_batches = run.step, run.position, run.num_micro_batches
    summary.documents, summary.epochs = run.documents.documents, run.documents.epochs
    return summary


def lines(events: list[tuple[Attempt, Outcome]], *, everything: bool = False) -> Iterator[str]:
    """The script of events as a table: its head and its end, or all of it."""
    table = [COLUMNS, *(_cells(number, *event) for number, event in enumerate(events, 1))]
    widths = [max(len(line[k]) for line in table) for k in range(len(COLUMNS))]
    for number, line in enumerate(table):
        if not everything and number == HEAD + 1 and len(events) > HEAD + TAIL:
            yield f"... {len(events) - HEAD - TAIL} more; all of them with --events ..."
        if everything or number <= HEAD or number > len(events) - TAIL:
            yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _cells(number: int, attempt: Attempt, outcome: Outcome) -> tuple[str, ...]:
    layout = attempt.layout
    return (
        str(number),
        f"{outcome.first} to {outcome.last}",
        attempt.end,
        str(outcome.lost) if outcome.lost else "-",
        str(layout.nodes),
        str(layout.ranks),
        f"{layout.tp} x {layout.pp} x {layout.dp}",
        str(layout.micro_batch_size),
        str(outcome.global_batch_size),
        attempt.changes,
    )


def rows(setup: Setup) -> Iterator[Row]:
    """A short simulation, and what planning costs one process and all of them, by ranks."""
    summary = simulate(min(setup.sizes.planned_samples, 20_000) // 4)
    yield Row(
        what=f"simulated starts on 1 to 24 nodes, {summary.steps:,} steps: samples repeated, skipped or out of order",
        ours=0.0,
        unit="samples",
        must="0",
        holds=True,  # `simulate` has raised otherwise
    )
    from benchmarks.simulated_cost import cost_rows

    yield from cost_rows(setup, RANKS, STEP_SAMPLES)


def main(argv: list[str] | None = None) -> int:
    """Run the simulation alone."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps trained for good")
    parser.add_argument("--seed", type=int, default=7, help="of the script and of the stream")
    parser.add_argument("--events", type=Path, metavar="FILE", help="write the whole script of events here")
    args = parser.parse_args(argv)
    from benchmarks.__main__ import one_core

    one_core()
    try:
        summary = simulate(args.steps, seed=args.seed)
    except Wrong as error:
        print(f"simulation: WRONG: {error}", file=sys.stderr)
        return 1
    if args.events is not None:
        args.events.write_text("\n".join(lines(summary.events, everything=True)) + "\n")
    print("\n".join(lines(summary.events)))
    layouts = [attempt.layout for attempt, _ in summary.events]
    print(
        f"\n{len(summary.events)} starts on {min(x.nodes for x in layouts)} to {max(x.nodes for x in layouts)} nodes, "
        f"{min(x.ranks for x in layouts)} to {max(x.ranks for x in layouts)} ranks, data-parallel sizes "
        f"{min(x.dp for x in layouts)} to {max(x.dp for x in layouts)}\n"
        f"{summary.steps:,} steps, {summary.samples:,} samples, {summary.micro_batches:,} micro-batches handed out; "
        f"{summary.lost:,} steps lost to kills and trained again\n"
        f"{summary.documents:,} documents counted, epochs closed: "
        f"{', '.join(f'{n} {e:,}' for n, e in zip(NUM_DOCUMENTS, summary.epochs, strict=True))}\n"
        "nothing repeated, nothing skipped, the order that of an uninterrupted stream"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
