"""What happens to a job on 24 nodes with 4,096 ranks: a script of attempts, drawn from a seed, before anything runs.

attempt 1 ──(preempted: saves)──▶ attempt 2 ──(node lost: back to the last checkpoint)──▶ attempt 3 ──▶ ...
nodes, tensor/pipeline/data-parallel ranks, micro-batch, global batch, blend: each may differ from the one before
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

#: Ranks of each node: 24 nodes that make 4,096.
NODE_RANKS = (171,) * 16 + (170,) * 8
#: How an attempt ends -> (how often, what is lost).
ENDS = {
    "preempted, saved": (20, "nothing"),
    "wall time, saved": (15, "nothing"),
    "nodes won, saved": (15, "nothing"),
    "rank killed": (20, "steps"),
    "node lost": (20, "steps"),
    "half of the nodes lost": (5, "steps"),
    "killed while saving": (10, "steps"),
    "newest checkpoint damaged": (3, "a checkpoint"),
}
#: (tensor, pipeline) parallel sizes.
MODELS = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8), (8, 16))
GLOBAL_BATCHES = (48, 96, 96, 120, 192, 240)
#: All 4,096 ranks data-parallel, one sample each.
WIDEST = 4096
#: Data-parallel ranks at most otherwise.
MOST_USUAL = 256
SAVE_INTERVALS = (5, 10, 20, 50)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the ranks of an attempt are used; those that do not divide stay idle, as a launcher leaves them."""

    nodes: int
    #: ranks that the nodes have.
    ranks: int
    tp: int
    pp: int
    dp: int
    micro_batch_size: int

    def __str__(self) -> str:
        return f"{self.nodes} nodes, {self.ranks} ranks, TP {self.tp} x PP {self.pp} x DP {self.dp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the job, up to its end."""

    layout: Layout
    #: steps that it trains, some of which may be lost.
    steps: int
    #: steps between checkpoints.
    save_interval: int
    #: a key of `ENDS`.
    end: str
    #: (samples from the start of the attempt, global batch size) segments; None: as before.
    sizes: tuple[tuple[int, int], ...] | None
    #: weights of the blend from here on: a new stage; None: as before.
    weights: tuple[int, ...] | None
    #: (samples from the start of the attempt, samples) to leave out; None: nothing.
    skip: tuple[int, int] | None

    @property
    def changes(self) -> str:
        """What the start changes besides the layout, in words."""
        words = []
        if self.sizes is not None:
            words.append("ramp-up" if len(self.sizes) > 1 else "batch size")
        if self.weights is not None:
            words.append("new stage of the blend")
        if self.skip is not None:
            words.append(f"{self.skip[1]} samples skipped")
        return ", ".join(words)


def script(steps: int, *, seed: int, num_sources: int) -> Iterator[Attempt]:
    """Attempts without an end; about 4,000 of them train a million steps.

    Args:
        steps: of the whole run, to which the length of attempts and the distance of rare changes is measured.
        seed: of the script.
        num_sources: sources of the blend.
    """
    rng = random.Random(seed)
    length = max(12, steps // 4000)
    # A state records every stage, skip and batch size for ever: as many as a long run may have, whatever its length.
    every_stage, every_skip, every_batch = (max(steps // length // n, 3) for n in (12, 12, 120))
    nodes, widest = 24, False
    # For the widest data-parallel layout the batch is another one until the next change.
    sizes: tuple[tuple[int, int], ...] = ((0, 48), (48 * 20, 96), (48 * 60, 144), (48 * 150, 240))
    number, end = 0, ""
    while True:
        number += 1
        nodes = _nodes(rng, nodes, end)
        new_sizes = sizes if number == 1 else None
        if widest or number % every_batch == 0 or (nodes == 24 and rng.random() < 0.02):
            widest = not widest and nodes == 24 and rng.random() < 0.3
            new_sizes = sizes = ((0, WIDEST),) if widest else _sizes(rng, length)
        layout = _layout(rng, nodes, sizes, widest)
        end = rng.choices(list(ENDS), [weight for weight, _ in ENDS.values()])[0]
        lived = max(1, round(rng.expovariate(1 / length)))
        yield Attempt(
            layout=layout,
            steps=min(lived, 60) if widest else lived,
            save_interval=rng.choice(SAVE_INTERVALS),
            end=end,
            sizes=new_sizes,
            weights=tuple(rng.randint(1, 6) for _ in range(num_sources)) if number % every_stage == 0 else None,
            skip=(rng.randint(0, 4000), rng.randint(1, 300)) if number % every_skip == every_skip // 2 else None,
        )


def _nodes(rng: random.Random, nodes: int, end: str) -> int:
    """Nodes of the next attempt, by the end of the last one."""
    if end == "node lost":
        return max(nodes - 1, 1)
    if end == "half of the nodes lost":
        return max(nodes // 2, 1)
    if end == "nodes won, saved":
        return min(nodes + rng.randint(1, 8), 24)
    if end == "preempted, saved":
        return rng.randint(1, 24)
    return nodes


def _sizes(rng: random.Random, length: int) -> tuple[tuple[int, int], ...]:
    final = rng.choice(GLOBAL_BATCHES)
    if rng.random() < 0.6 or final == 48:
        return ((0, final),)
    every = 48 * max(length // 6, 2)
    ramp = [(k * every, size) for k, size in enumerate(range(48, final, 48))]
    return (*ramp, (every * len(ramp), final))


def _layout(rng: random.Random, nodes: int, sizes: tuple[tuple[int, int], ...], widest: bool) -> Layout:
    ranks = sum(NODE_RANKS[:nodes])
    if widest:
        return Layout(nodes=nodes, ranks=ranks, tp=1, pp=1, dp=WIDEST, micro_batch_size=1)
    fitting = [(tp, pp) for tp, pp in MODELS if tp * pp <= ranks <= tp * pp * 4 * MOST_USUAL]
    tp, pp = rng.choice(fitting)
    micro = rng.choice((1, 2, 4))
    most = min(ranks // (tp * pp), MOST_USUAL)
    fits = (d for d in range(most, 0, -1) if all(size % (d * micro) == 0 for _, size in sizes))
    return Layout(nodes=nodes, ranks=ranks, tp=tp, pp=pp, dp=next(fits), micro_batch_size=micro)
