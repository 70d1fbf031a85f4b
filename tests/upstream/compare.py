"""What every optimizer step was fed, in order, put together from the logs of all ranks."""

from __future__ import annotations

import json
from pathlib import Path

#: trained samples before a step -> hashes of its global batch, in the order of the samples.
Steps = dict[int, list[str]]


def read_steps(directory: Path, end: int) -> Steps:
    """Put the global batches together from what each data-parallel rank read, before sample ``end``.

    Micro-batch k of the global batch comes after micro-batch k - 1 of all ranks, and in it the ranks follow each
    other. Ranks of one model (tensor, pipeline, virtual-pipeline or context parallel) that read at all must have read
    the same.

    Raises:
        ValueError: they have not.
    """
    ranks: dict[int, dict[tuple[int, int], dict[int, list[list[str]]]]] = {}
    for path in sorted(directory.glob("batches-*.jsonl")):
        rank = int(path.stem.partition("-")[2])
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if entry["consumed"] < end:
                readers = ranks.setdefault(entry["dp"], {})
                read = readers.setdefault((rank, entry["loader"]), {})
                read.setdefault(entry["consumed"], []).append(entry["rows"])
    of_ranks = []
    for dp in sorted(ranks):
        first, *others = ranks[dp].items()
        for reader, read in others:
            if read != first[1]:
                raise ValueError(f"(rank, loader) {reader} and {first[0]} of one model read different data")
        of_ranks.append(first[1])
    steps = {}
    for consumed in sorted({consumed for read in of_ranks for consumed in read}):
        batches = [read.get(consumed, []) for read in of_ranks]
        rounds = max(map(len, batches))
        steps[consumed] = [row for k in range(rounds) for one in batches if k < len(one) for row in one[k]]
    return steps


def difference(found: Steps, expected: Steps, start: int, end: int) -> str | None:
    """None if the steps from sample ``start`` to ``end`` are those expected, in order; else the first difference."""
    steps = [step for step in sorted(expected) if start <= step < end]
    if sorted(found) != steps:
        return f"trained the steps at {sorted(found)}, not at {steps}"
    for step, after in zip(steps, [*steps[1:], end], strict=True):
        if not len(found[step]) == len(expected[step]) == after - step:
            return f"{len(found[step])} samples at {step}, not {after - step}"
        for place, (one, other) in enumerate(zip(found[step], expected[step], strict=True)):
            if one != other:
                return f"sample {step + place} is another one"
    return None
