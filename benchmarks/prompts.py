"""`megaresume.Prompts` with many prompts in flight of a dataset of 10^9, beside the least that a trainer does without
it: torch's ``RandomSampler``, and a dict of what is out.

The sampler draws with replacement: a permutation of 10^9 is 8 GB of memory to it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import torch
import torch.utils.data

from benchmarks.items import Numbers
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import interleaved, median, ratio
from megaresume.hosts.prompts import Prompts

ITEMS = 10**9
#: prompts in flight, as a fraction of the documents that other rows have: 100,000, as it is measured.
IN_FLIGHT = 100
EXCEPTIONS = 10_000


def rows(setup: Setup) -> Iterator[Row]:
    """Issue, done, the state."""
    most = max(setup.sizes.index_documents // IN_FLIGHT, 64)
    dataset = Numbers(ITEMS)
    prompts, sampler = Prompts(dataset), iter(torch.utils.data.RandomSampler(range(ITEMS), replacement=True))
    out: dict[int, int] = {}
    issued = {prompt.ordinal: prompt for prompt in prompts.issue(most)}
    for _ in range(most):
        out[next(sampler)] = 0
    some = max(most // 20, 32)

    def ours(_: int) -> None:
        for prompt in prompts.issue(some):
            issued[prompt.ordinal] = prompt

    def theirs(_: int) -> None:
        for _ in range(some):
            item = next(sampler)
            out[item] = dataset[item]

    seconds = interleaved({"ours": ours, "torch": theirs}, setup.sizes.repetitions)
    yield _row(f"Prompts, {most:,} of 10^9 in flight: issue", seconds, some)

    waiting = iter(random.Random(0).sample(list(issued.values()), some * (setup.sizes.repetitions + 1)))
    taken = iter(random.Random(0).sample(list(out), some * (setup.sizes.repetitions + 1)))
    back: dict[int, int] = {}

    def done(_: int) -> None:
        for _ in range(some):
            prompt = next(waiting)
            prompts.done(prompt.ordinal, prompt.ticket)

    def popped(_: int) -> None:
        for _ in range(some):
            item = next(taken)
            back[item] = out.pop(item, 0)

    seconds = interleaved({"ours": done, "torch": popped}, setup.sizes.repetitions)
    yield _row(f"Prompts, {most:,} of 10^9 in flight: done", seconds, some)

    count = min(EXCEPTIONS, most // 2)
    again = Prompts(dataset)
    fresh = again.issue(most)
    for prompt in (chosen := random.Random(1).sample(fresh, count)):
        again.done(prompt.ordinal, prompt.ticket)
    again.trained(1, [prompt.ordinal for prompt in chosen])
    seconds = interleaved(
        {"ours": lambda _: again.state_dict(), "torch": lambda _: json.dumps(sorted(out))}, setup.sizes.repetitions
    )
    kilobytes = len(json.dumps(again.state_dict())) / 1024
    what = f"Prompts, {most:,} of 10^9 in flight, {count:,} exceptions: "
    yield Row(
        what=what + "state",
        ours=median(seconds["ours"]) * 1e3,
        unit="ms",
        baseline=median(seconds["torch"]) * 1e3,
        against="the keys of a dict as JSON",
        ratio=ratio(seconds["ours"], seconds["torch"]),
    )
    yield Row(
        what=what + "size of it",
        ours=kilobytes,
        unit="KB",
        baseline=len(json.dumps(sorted(out))) / 1024,
        against="the keys of a dict as JSON",
        must="<= 64 KB",
        holds=kilobytes <= 64,
    )


def _row(what: str, seconds: dict[str, list[float]], each: int) -> Row:
    microseconds = median(seconds["ours"]) / each * 1e6
    return Row(
        what=what,
        ours=microseconds,
        unit="us",
        baseline=median(seconds["torch"]) / each * 1e6,
        against="RandomSampler and a dict",
        ratio=ratio(seconds["ours"], seconds["torch"]),
        must="< 5 us",
        holds=microseconds < 5,
    )
