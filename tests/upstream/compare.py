"""What every optimizer step was fed, in order, put together from the logs of all ranks."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["difference", "read_steps"]


def read_steps(directory: Path) -> dict[int, list[str]]:
    """Trained samples before a step -> hashes of its global batch, in the order of the samples.

    Micro-batch k of the global batch lies behind micro-batch k - 1 of all ranks, and in it the ranks follow each other.
    """
    ranks: list[dict[int, list[list[str]]]] = []
    for path in sorted(directory.glob("batches-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2])):
        micro: dict[int, list[list[str]]] = {}
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if entry["loader"] == 0:
                micro.setdefault(entry["consumed"], []).append(entry["rows"])
        ranks.append(micro)
    steps = {}
    for consumed in sorted({consumed for micro in ranks for consumed in micro}):
        of_ranks = [micro.get(consumed, []) for micro in ranks]
        rounds = max(len(batches) for batches in of_ranks)
        steps[consumed] = [row for k in range(rounds) for batches in of_ranks if k < len(batches) for row in batches[k]]
    return steps


Steps = dict[int, list[str]]


def difference(found: Steps, expected: Steps, start: int, end: int, size: int) -> str | None:
    """None where the steps from sample ``start`` to ``end`` are those expected, in order; else the first difference."""
    steps = list(range(start, end, size))
    if sorted(found) != steps:
        return f"trained the steps at {sorted(found)}, not at {steps}"
    for step in steps:
        if len(expected.get(step, [])) != size:
            return f"the uninterrupted run has {len(expected.get(step, []))} samples at {step}, not {size}"
        for place, (one, other) in enumerate(zip(found[step], expected[step], strict=False)):
            if one != other:
                return f"sample {step + place} is another one"
        if len(found[step]) != size:
            return f"{len(found[step])} samples at {step}, not {size}"
    return None
