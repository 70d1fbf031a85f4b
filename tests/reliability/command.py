"""The command: all kills and faults, counted, and what came of them as a table in docs/reliability.md."""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.reliability import document, faults, kills
from tests.reliability.harness import Harness, Lost
from tests.reliability.session import session

#: rows of the table; each tells a ZeRO stage and how often, and yields outcomes.
Part = Callable[[Harness, int], Iterator[str]]

SAVE = "SIGKILL before a file operation of a save: every operation, each rank"
WRITE = "SIGKILL in the middle of a write of a save: every write, each rank"
START = "SIGKILL before a file operation of the start after a killed save"
MOMENT = "SIGKILL of all ranks at a random moment of a save"
FLIP = "flip"


def _of_kills(found: Iterator[kills.Kill]) -> Iterator[str]:
    for _ in found:
        yield "resumed exactly"


def kill_parts(*, everything: bool, quick: bool = False) -> list[tuple[str, int, Part]]:
    """One round of kills.

    Args:
        everything: each kind at each ZeRO stage; otherwise some kinds at some.
        quick: each kind at one, about 75 kills.
    """

    def saves(rank: int, mode: str) -> Part:
        return lambda harness, zero: _of_kills(kills.in_saves(harness, zero, rank, mode))  # type: ignore[arg-type]

    parts: list[tuple[str, int, Part]] = []
    for zero in (3,) if quick else range(4):
        parts += [(SAVE, zero, saves(rank, "kill")) for rank in ((0,) if quick else (0, 1))]
    for zero in range(4) if everything else (3,):
        parts += [(WRITE, zero, saves(rank, "half")) for rank in ((1,) if quick else (0, 1))]
    rounds, number = (6, 25) if everything else (1, 4 if quick else 10)
    for zero in range(4) if everything else (2,):
        parts.append((START, zero, lambda harness, zero: _of_kills(kills.in_starts(harness, zero, "kill", rounds))))
    for zero in range(4) if everything else (1,):
        parts.append((MOMENT, zero, lambda harness, zero: _of_kills(kills.random_moments(harness, zero, number))))
    return parts


class Results:
    """What came of every trial, kept in a file: a command that was interrupted goes on."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.counts: dict[str, Counter[str]] = {}
        self.lost: list[str] = []
        if path is not None and path.exists():
            saved = json.loads(path.read_text())
            self.counts = {name: Counter(counts) for name, counts in saved["counts"].items()}
            self.lost = saved["lost"]

    def add(self, name: str, outcome: str) -> None:
        self.counts.setdefault(name, Counter())[outcome] += 1

    def add_lost(self, name: str, error: Lost) -> None:
        self.add(name, "lost")
        self.lost.append(f"{name}: {error}")
        print(f"LOST {name}: {error}", flush=True)

    def save(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps({"counts": self.counts, "lost": self.lost}, indent=1))

    @property
    def num_kills(self) -> int:
        return sum(self.counts.get(name, Counter()).total() for name in (SAVE, WRITE, START, MOMENT))


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: nothing was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("--kills", type=int, default=330, help="at least so many; more than 330: at every ZeRO stage")
    parser.add_argument("--quick", action="store_true", help="each kind of kill at one ZeRO stage, as `make test` does")
    parser.add_argument("--trials", type=int, default=6, help="of every other fault")
    parser.add_argument("--seed", type=int, default=None, help="default: the time; always printed")
    parser.add_argument("--results", type=Path, help="file in which to go on counting")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/reliability.md")
    parser.add_argument("--session", action="store_true", help="print the session of docs/reliability.md; no more")
    arguments = parser.parse_args(argv)
    if arguments.session:
        text = session()
        print(text, end="")
        if arguments.write:
            document.write_session(text)
        return 0
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    results = Results(arguments.results)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megaresume-reliability-") as work:
        harness = Harness(Path(work), seed=seed)
        everything = arguments.kills > 330
        parts = kill_parts(everything=everything, quick=arguments.quick)
        for done, (name, zero, part) in enumerate(itertools.cycle(parts)):
            if results.num_kills >= arguments.kills and (everything or not arguments.kills or done >= len(parts)):
                break
            try:
                for outcome in part(harness, zero):
                    results.add(name, outcome)
            except Lost as error:
                results.add_lost(name, error)
            results.save()
            print(f"{time.monotonic() - began:6.0f} s  {results.num_kills} kills  ZeRO {zero}: {name}", flush=True)
        for name in faults.FAULTS:
            for number in range(results.counts.get(name, Counter()).total(), arguments.trials):
                try:
                    results.add(name, faults.trial(harness, number % 4, name))
                except Lost as error:
                    results.add_lost(name, error)
            results.save()
            print(f"{time.monotonic() - began:6.0f} s  {name}: {dict(results.counts[name])}", flush=True)
        for number in range(results.counts.get(FLIP, Counter()).total(), arguments.trials):
            results.add(FLIP, faults.silent_flip(harness, number % 4))
        results.save()
        print(f"{time.monotonic() - began:6.0f} s  flips without checksums: {dict(results.counts[FLIP])}", flush=True)
    if arguments.write:
        document.write(results.counts, flips=FLIP)
    print(f"{results.num_kills} kills, {len(results.lost)} lost, seed {seed}", flush=True)
    return 1 if results.lost else 0
