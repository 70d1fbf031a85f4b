"""The live figures of a run (docs/metrics.md) for its report: use of time, and losses by source and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaresume.checkpoint.metrics.goodput import all_marks, goodput_of, shows_kills
from megaresume.checkpoint.metrics.record import marks_of, meter_dir, read_lines, read_pulse
from megaresume.checkpoint.records.position import read_position
from megaresume.render import COLOURS, svg
from megaresume.runs.directory import Run

#: most points of a line.
MOST_POINTS = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """What was measured in a run."""

    #: seconds since its first process started; and how many of them produced steps that were kept.
    seconds: float
    goodput: float
    #: the other seconds, by cause.
    badput: Mapping[str, float]
    #: the number of samples trained again because a kill had lost them.
    repeated: int
    #: source -> (step, loss per token as a moving average), ascending.
    losses: Mapping[str, Sequence[tuple[int, float]]]


def read_figures(run: Run) -> RunFigures | None:
    """The figures of a run; None if it was not measured.

    Args:
        run: the run.

    Raises:
        StateError: its ledger cannot be read.
    """
    directory = meter_dir(run.root)
    measured = marks_of(read_lines(directory / "run.jsonl"), read_pulse(directory))
    entries, position = run.ledger.entries, read_position(run.root)
    if not shows_kills(measured, entries, position):
        return None
    spent = goodput_of(all_marks(measured, entries, position))
    by_step: dict[int, Mapping[str, Any]] = {}
    for line in read_lines(directory / "figures.jsonl"):
        losses = line.get("figures", {}).get("megaresume.source.loss")
        if isinstance(losses, Mapping):
            step = int(line["step"])
            while by_step and next(reversed(by_step)) >= step:  # lost: the run went back
                by_step.popitem()
            by_step[step] = losses
    stride = -(-len(by_step) // MOST_POINTS) or 1
    found: dict[str, list[tuple[int, float]]] = {}
    for step in list(by_step)[::-1][::stride][::-1]:  # counted from the newest
        for name, loss in by_step[step].items():
            found.setdefault(name, []).append((step, float(loss)))
    return RunFigures(
        seconds=round(spent.seconds, 3),
        goodput=spent.goodput,
        badput={cause: round(seconds, 3) for cause, seconds in spent.badput.items()},
        repeated=spent.repeated,
        losses=found,
    )


def parts_of_page(figures: RunFigures, mark: Any) -> list[str]:
    """The parts of the report with the figures.

    Args:
        figures: those of the run.
        mark: marks stages and restarts on axes of steps.
    """
    hours = figures.seconds / 3600
    parts = [
        "<h2>Where the time went</h2>",
        f"<p>{100 * figures.goodput:.2f} % of {hours:,.2f} hours made steps that were kept; {figures.repeated:,} "
        "samples were trained again.</p>",
        _time(figures),
    ]
    return [*parts, "<h2>Loss by source</h2>", _losses(figures, mark)] if figures.losses else parts


def _time(figures: RunFigures) -> str:
    def draw(axes: Any) -> None:
        kept = figures.goodput * figures.seconds
        left = 0.0
        for k, (cause, seconds) in enumerate({"steps that were kept": kept, **figures.badput}.items()):
            part = seconds / figures.seconds if figures.seconds else 0.0
            if seconds:
                words = f"{cause} {100 * part:.1f} %"
                axes.barh([0], [part], left=[left], color=COLOURS[k % len(COLOURS)], label=words)
            left += part
        axes.set_yticks([])
        axes.set_xlim(0, 1)
        axes.set_xlabel("part of the time since the first start")
        axes.figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)

    return svg(draw, height=1.8)


def _losses(figures: RunFigures, mark: Any) -> str:
    def draw(axes: Any) -> None:
        for k, (name, points) in enumerate(figures.losses.items()):
            axes.plot(*zip(*points, strict=True), color=COLOURS[k % len(COLOURS)], lw=1.4, label=name)
        axes.set_ylabel("loss by token")
        mark(axes)
        axes.figure.legend(loc="outside right upper", frameon=False, fontsize=9)

    return svg(draw, height=3.4)
