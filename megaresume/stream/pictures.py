"""A state and a plan in Jupyter: a small table with bars, as HTML with SVG in it.

Text and empty bars take the colour of the page's text, so both light and dark pages do.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from megaresume.stream.errors import visible
from megaresume.stream.kernel import LENGTH, SOURCE

#: The colours of sources, in this order; told apart by the colour-blind, and readable on white and on black.
COLOURS = ("#2a8fbd", "#d9772f", "#4a9d6b", "#9b6fc9", "#b08d1e", "#d0588f", "#7a8599", "#12a594")
WIDTH, HEIGHT = 140, 11
#: sources that get a row, those with the most tokens; of the rest there is one sum.
MOST = 24
#: columns of the picture of the samples' lengths.
COLUMNS = 28


def picture_of_state(state: Any) -> str:
    """The samples that a `StreamState` has trained, and how far each source is. HTML."""
    names = list(state.sources)
    weights = {name: float(source["weight"]) for name, source in state.stages[-1].config["sources"].items()}
    drawn = [cursor.tokens for cursor in state.sources.values()]
    room = state.places(0, state.samples)
    facts = [f"{state.samples:,} samples", f"{state.tokens:,} tokens", f"{state.documents:,} documents"]
    facts += [f"{state.tokens / room:.2%} of all positions filled"] if room else []
    facts += [f"{len(state.stages)} stages"] if len(state.stages) > 1 else []
    rows = []
    for i in _largest(drawn):
        cursor = state.sources[names[i]]
        share, declared = drawn[i] / max(sum(drawn), 1), weights[names[i]] / max(sum(weights.values()), 1e-30)
        done = cursor.epochs
        rows.append(
            (
                _name(names[i], i),
                f"{drawn[i]:,}",
                f"{_bar(share, i, mark=declared)} {share:.1%} ({declared:.1%})",
                f"{_bar(done % 1 if not cursor.exhausted else 1, i)} {done:.2f}{' (ended)' * cursor.exhausted}",
            )
        )
    head = ("source", "tokens drawn", "share (its weight: the line)", "epochs")
    return _table(f"Stream after {facts[0]}", facts[1:], head, rows, len(names), f"digest {state.digest}")


def picture_of_plan(plan: Any) -> str:
    """The contents of the samples of a `Plan`. HTML."""
    sources, lengths = plan.table[:, SOURCE], plan.table[:, LENGTH]
    num = len(plan.orders)
    tokens = np.bincount(sources, lengths, num).astype(np.int64)
    segments = np.bincount(sources, minlength=num)
    of_samples, epochs = plan.tokens(), plan.epochs()
    facts = [f"{len(plan):,} samples", f"{int(tokens.sum()):,} tokens", f"{len(plan.table):,} segments"]
    rows = []
    for i in _largest(tokens.tolist()):
        if not segments[i]:
            continue
        share, mine = tokens[i] / max(tokens.sum(), 1), epochs[sources == i]
        first, last = int(mine.min()) + 1, int(mine.max()) + 1
        rows.append(
            (
                _name(plan.orders[i].name, i),
                f"{tokens[i]:,}",
                f"{_bar(float(share), i)} {share:.1%}",
                f"{segments[i]:,}",
                f"{first}" if first == last else f"{first} to {last}",
            )
        )
    head = ("source", "tokens", "share", "segments", "epoch")
    foot = (
        f"tokens of a sample: {of_samples.min():,} to {of_samples.max():,} {_columns(of_samples)}" if len(plan) else ""
    )
    return _table(f"Samples {plan.first:,} to {plan.stop - 1:,}", facts, head, rows, int((segments > 0).sum()), foot)


def _largest(amounts: Sequence[int]) -> list[int]:
    """The numbers of those that are shown, in their order."""
    return sorted(sorted(range(len(amounts)), key=lambda i: -amounts[i])[:MOST])


def _name(name: str, number: int) -> str:
    dot = f'<circle cx="5" cy="5" r="4.5" fill="{COLOURS[number % len(COLOURS)]}"/>'
    return f'<svg width="10" height="10" aria-hidden="true">{dot}</svg> {html.escape(visible(name))}'


def _bar(share: float, number: int, *, mark: float | None = None) -> str:
    """A bar from 0 to 1; ``mark``: a line across it."""
    inside = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="2" fill="currentColor" opacity=".15"/>'
    colour = COLOURS[number % len(COLOURS)]
    inside += f'<rect width="{WIDTH * min(share, 1):.1f}" height="{HEIGHT}" rx="2" fill="{colour}"/>'
    if mark is not None:
        place = f'x="{max(WIDTH * min(mark, 1) - 1, 0):.1f}" width="2" height="{HEIGHT}"'
        inside += f'<rect {place} fill="currentColor"/>'
    label = f'role="img" aria-label="{share:.0%}"'
    return f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" {label}>{inside}</svg>'


def _columns(amounts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    """A histogram of amounts: a column for each range, from the smallest to the largest."""
    counts, _ = np.histogram(amounts, bins=COLUMNS)
    step, tall = WIDTH / COLUMNS, 22
    parts = [
        f'<rect x="{i * step:.1f}" y="{tall - height:.1f}" width="{step - 1:.1f}" height="{height:.1f}"/>'
        for i, height in enumerate((tall * counts / counts.max()).tolist())
        if height
    ]
    size = f'width="{WIDTH}" height="{tall}" viewBox="0 0 {WIDTH} {tall}"'
    return f'<svg {size} role="img" aria-label="how often" fill="currentColor" opacity=".6">{"".join(parts)}</svg>'


def _table(
    title: str, facts: Sequence[str], head: Sequence[str], rows: Sequence[Sequence[str]], num: int, foot: str
) -> str:
    cell = 'style="text-align: left; padding: .1em .9em .1em 0; white-space: nowrap"'
    lines = ["".join(f"<th {cell}>{word}</th>" for word in head)]
    lines += ["".join(f"<td {cell}>{word}</td>" for word in row) for row in rows]
    more = f"<div>and {num - len(rows)} smaller sources</div>" if num > len(rows) else ""
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f"<div><div><b>{title}</b>: {', '.join(facts)}</div>"
        f'<table style="border-collapse: collapse">{table}</table>{more}<div><small>{foot}</small></div></div>'
    )
