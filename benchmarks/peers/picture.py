"""``python -m benchmarks.peers.picture``: one epoch, killed three times, under StatefulDataLoader and under megaresume.

The run trains on 4 ranks; a node goes, comes back and goes again, so it is resumed on 2, 4 and 2 ranks, with the same
global batch. Every square of the picture is a sample, in the order of the epoch, as an undisturbed run trains them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.peers.drawing import Panel, svg
from benchmarks.peers.launch import ROOT, Plan, run, scratch
from benchmarks.peers.recorder import Life, count, read, survived
from benchmarks.peers.scenario import Layout
from benchmarks.peers.tools import TOOLS

#: ranks of each life, and the step after which it is killed; the batch of a rank is such that a step stays as large.
LIVES = ((4, 16), (2, 31), (4, 43), (2, None))
GLOBAL_BATCH = 16
ITEMS = 960
TITLES = {"torchdata": "torchdata’s StatefulDataLoader", "megaresume": "megaresume"}


def lives_of(name: str, directory: Path) -> list[Life]:
    """The run under a tool: what was trained between two kills.

    Raises:
        RuntimeError: it could not be resumed.
    """
    found = []
    for number, (ranks, kill_after) in enumerate(LIVES, start=1):
        layout = Layout(ranks=ranks, batch_size=GLOBAL_BATCH // ranks, items=ITEMS)
        plan = Plan(
            tool=name,
            layout=layout,
            directory=directory,
            data=directory,
            life=number,
            epochs=1,
            kill_after=kill_after,
        )
        failed = run(sys.executable, plan)
        life = read(directory / "records", number)
        if failed is not None or life is None:
            raise RuntimeError(f"{name}, life {number}: {failed}")
        found.append(life)
    return found


def panel(name: str, lives: list[Life], order: list[int]) -> Panel:
    """What happened to each sample.

    Args:
        name: of the tool.
        lives: of its run.
        order: of the samples in an undisturbed run.
    """
    steps = survived(lives)
    times = Counter(sample for samples in steps.values() for sample in samples)
    # The life in which a sample was trained; steps after the last checkpoint of a life are done again in the next.
    starts = [life.start for life in lives]
    first: dict[int, int] = {}
    for step in sorted(steps):
        for sample in steps[step]:
            first.setdefault(sample, sum(start < step for start in starts) - 1)
    repeated, never = count(steps, epochs=1, items=len(order))
    return Panel(
        title=TITLES[name],
        times=[times[sample] for sample in order],
        lives=[first.get(sample, 0) for sample in order],
        repeated=repeated,
        never=never,
    )


def undisturbed(name: str, directory: Path) -> list[int]:
    """The order of the samples: those of a step are sorted, as ranks train them at the same time."""
    ranks, _ = LIVES[0]
    layout = Layout(ranks=ranks, batch_size=GLOBAL_BATCH // ranks, items=ITEMS)
    plan = Plan(tool=name, layout=layout, directory=directory, data=directory, life=1, epochs=1)
    failed = run(sys.executable, plan)
    life = read(directory / "records", 1)
    if failed is not None or life is None:
        raise RuntimeError(f"{name}: {failed}")
    return [sample for step in sorted(life.steps) for sample in sorted(life.steps[step])]


def main(argv: list[str] | None = None) -> int:
    """Run both, and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.picture", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "killed-three-times.svg", metavar="FILE")
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep what was recorded; if it is there, only draw")
    args = parser.parse_args(argv)
    if args.record is not None and args.record.exists():
        recorded = json.loads(args.record.read_text())
    else:
        recorded = {name: _recorded(name) for name in TITLES}
        if args.record is not None:
            args.record.write_text(json.dumps(recorded))
    panels = [
        panel(
            name,
            [
                Life(start=life["start"], steps={int(step): samples for step, samples in life["steps"].items()})
                for life in recorded[name]["lives"]
            ],
            recorded[name]["order"],
        )
        for name in TITLES
    ]
    args.output.write_text(svg(panels, ranks=[ranks for ranks, _ in LIVES]))
    print(
        f"{args.output}: " + "; ".join(f"{p.title}: {p.repeated:.0f} % repeated, {p.never:.0f} % never" for p in panels)
    )
    return 0


def _recorded(name: str) -> dict[str, Any]:
    assert name in TOOLS
    with scratch() as directory:
        order = undisturbed(name, Path(directory) / "undisturbed")
        lives = lives_of(name, Path(directory) / "killed")
    return {"order": order, "lives": [{"start": life.start, "steps": life.steps} for life in lives]}


if __name__ == "__main__":
    sys.exit(main())
