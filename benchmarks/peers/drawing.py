"""The picture as SVG: two panels of squares, a legend, and a line that says what was lost.

It has a card of its own as background, in light and dark, so that it can be read wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 960
MARGIN = 36
GAP = 48
COLUMNS = 40
PANEL = (WIDTH - 2 * MARGIN - GAP) / 2
PITCH = PANEL / COLUMNS
TOP = 120

STYLE = """
.card { fill: #ffffff; stroke: #d0d7de }
.ink { fill: #1f2328 } .quiet { fill: #59636e }
.life0 { fill: #9fc5e8 } .life1 { fill: #6fa8dc } .life2 { fill: #3d7fc1 } .life3 { fill: #1f5a96 }
.repeated { fill: #d1242f } .never { fill: #fff4d6; stroke: #bf8700; stroke-width: 1.2 }
.bad { fill: #c01c28 } .good { fill: #1a7f37 }
text { font-family: -apple-system, BlinkMacSystemFont, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif }
@media (prefers-color-scheme: dark) {
.card { fill: #161b22; stroke: #3d444d }
.ink { fill: #f0f6fc } .quiet { fill: #9198a1 }
.life0 { fill: #24476b } .life1 { fill: #2f6299 } .life2 { fill: #4489cc } .life3 { fill: #79b8f3 }
.repeated { fill: #ff5c57 } .never { fill: #3b2e0b; stroke: #e3b341 }
.bad { fill: #ff7b72 } .good { fill: #56d364 }
}
""".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One loader. Lists have an entry for each sample, in the order of the epoch."""

    title: str
    #: how often it was trained.
    times: Sequence[int]
    #: in which life of the run it was trained first, from 0.
    lives: Sequence[int]
    #: per cent of the samples.
    repeated: float
    never: float


def svg(panels: Sequence[Panel], *, ranks: Sequence[int]) -> str:
    """The picture.

    Args:
        panels: two.
        ranks: of each life of the run.
    """
    rows = -(-len(panels[0].times) // COLUMNS)
    bottom = TOP + rows * PITCH
    height = bottom + 82
    changes = ", ".join(str(number) for number in ranks[1:-1]) + f" and {ranks[-1]}"
    head = f"One epoch on {ranks[0]} ranks, killed three times, resumed on {changes} ranks"
    said = "; ".join(f"{panel.title}: {_lost(panel)}" for panel in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-labelledby="title desc">',
        f"<title id='title'>{escape(head)}</title>",
        f"<desc id='desc'>{escape(said)}</desc>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="12"/>',
        f'<text class="ink" x="{MARGIN}" y="42" font-size="21" font-weight="600">{escape(head)}</text>',
    ]
    for number, panel in enumerate(panels):
        left = MARGIN + number * (PANEL + GAP)
        lost = "bad" if panel.repeated or panel.never else "good"
        parts += [
            f'<text class="ink" x="{left:.1f}" y="80" font-size="17" font-weight="600">{escape(panel.title)}</text>',
            f'<text class="{lost}" x="{left:.1f}" y="104" font-size="17" font-weight="600">{_lost(panel)}</text>',
            *_squares(panel, left),
        ]
    parts += [*_legend(ranks, bottom + 32), "</svg>"]
    return "\n".join(parts) + "\n"


def _lost(panel: Panel) -> str:
    if not panel.repeated and not panel.never:
        return "every sample trained exactly once"
    return f"{panel.repeated:.0f} % of the samples trained again, {panel.never:.0f} % never"


def _squares(panel: Panel, left: float) -> list[str]:
    """One path for each class: a thousand elements would be slow to show."""
    paths: dict[str, list[str]] = {}
    side = PITCH - 2
    for i, (times, life) in enumerate(zip(panel.times, panel.lives, strict=True)):
        name = "never" if times == 0 else "repeated" if times > 1 else f"life{life}"
        x, y = left + i % COLUMNS * PITCH + 1, TOP + i // COLUMNS * PITCH + 1
        if name == "never":  # the line lies within the square
            x, y, width = x + 0.6, y + 0.6, side - 1.2
        else:
            width = side
        paths.setdefault(name, []).append(f"M{x:.1f} {y:.1f}h{width:.1f}v{width:.1f}h{-width:.1f}z")
    return [f'<path class="{name}" d="{"".join(found)}"/>' for name, found in sorted(paths.items())]


def _legend(ranks: Sequence[int], top: float) -> list[str]:
    once = [(f"life{i}", f"then on {n}" if i else f"trained once, on {n} ranks") for i, n in enumerate(ranks)]
    parts, x = [], float(MARGIN)
    for name, label in [*once, ("repeated", "trained again"), ("never", "never trained")]:
        parts += _entry(name, label, x, top)
        x += 44 + 6.6 * len(label)
    text = "Each square is one sample of the epoch, in the order in which an undisturbed run trains them."
    return [*parts, f'<text class="quiet" x="{MARGIN}" y="{top + 30:.1f}" font-size="14">{text}</text>']


def _entry(name: str, label: str, x: float, y: float) -> list[str]:
    return [
        f'<rect class="{name}" x="{x:.1f}" y="{y - 11:.1f}" width="12" height="12"/>',
        f'<text class="quiet" x="{x + 19:.1f}" y="{y:.1f}" font-size="14">{escape(label)}</text>',
    ]
