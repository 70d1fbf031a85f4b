"""The command: all kills and faults, counted, and what came of them as a table in docs/reliability.md."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from tests.reliability import cuts, damage, document, faults, kills, staging
from tests.reliability.harness import Harness, Lost
from tests.reliability.job import MEGATRON, Kind
from tests.reliability.session import session

#: rows of the table; each tells a ZeRO stage and how often, and yields outcomes.
Part = Callable[[Harness, int], Iterator[str]]

SAVE = "SIGKILL before a file operation of a save: every operation, each rank"
WRITE = "SIGKILL in the middle of a write of a save: every write, each rank"
START = "SIGKILL before a file operation of the start after a killed save"
MOMENT = "SIGKILL of all ranks at a random moment of a save"
COPY = "SIGKILL before a file operation among the copies of `stage_to`: {}"
COPIES: dict[staging.Kind, str] = {
    "first copy, lost": COPY.format("the first copy, local storage lost"),
    "kept": COPY.format("local storage kept"),
    "lost": COPY.format("local storage lost"),
}
KILL_OF = "SIGKILL in a save, {}: before a file operation of either rank"
WRITE_OF = "SIGKILL in a save, {}: in the middle of a write of either rank"
WRITER = "SIGKILL of all ranks at a random moment of a save, decoupled writer"
CUT_OF = "power cut in a save, {}: what the next start chooses"
#: by kind of job: its name in rows.
KINDS: dict[Kind, str] = {"loader": "attached loader", "pipeline": "pipeline engine"}
#: by kind of job of Megatron: its rows.
MEGATRON_ROWS: dict[Kind, str] = {kind: KILL_OF.format(f"Megatron-LM, {kind}") for kind in MEGATRON}
MEGATRON_WRITES: dict[Kind, str] = {kind: WRITE_OF.format(f"Megatron-LM, {kind}") for kind in MEGATRON}
MEGATRON_CUTS: dict[Kind, str] = {kind: CUT_OF.format(f"Megatron-LM, {kind}") for kind in MEGATRON}
MODES: tuple[Literal["kill", "half"], ...] = ("kill", "half")
FLIP = "flip"


def _of_kills(found: Iterator[kills.Kill]) -> Iterator[str]:
    for _ in found:
        yield "resumed exactly"


def kill_parts(*, everything: bool, quick: bool = False) -> list[tuple[str, int, Part]]:
    """One round of kills.

    Args:
        everything: each kind at each ZeRO stage; otherwise some kinds at some.
        quick: each kind at one, and every sixth operation of a save: about 65 kills.
    """
    every = 6 if quick else 1

    def saves(rank: int, mode: str) -> Part:
        return lambda harness, zero: _of_kills(
            kills.in_saves(harness, zero, rank, mode, every=every if mode == "kill" else 1)  # type: ignore[arg-type]
        )

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


def cut_power(harness: Harness, results: Results, number: int) -> None:
    """All power cuts; of each row the first five that lost something are printed."""
    logging.getLogger("megaresume").setLevel(logging.ERROR)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="megaresume-cuts-", dir=memory) as work:
        for name, verdict, words in cuts.power_cuts(harness, Path(work), number):
            results.add(name, verdict)
            if verdict in ("lost", "other bytes"):
                results.lost.append(f"{name}: {verdict}: {words}")
                if results.counts[name]["lost"] + results.counts[name]["other bytes"] <= 5:
                    print(f"{verdict} {name}: {words}", flush=True)
    for name, counts in results.counts.items():
        if name.startswith("power cut"):
            print(f"{name}: {dict(counts)}", flush=True)


def try_kinds(harness: Harness, results: Results, every: int) -> None:
    """Kills and power cuts in jobs of other kinds."""
    for kind, name in KINDS.items():
        row = KILL_OF.format(name)
        for rank, mode in ((0, "kill"), (1, "kill"), (1, "half")):
            try:
                step = every if rank == 0 else max(1, every // 4)
                for _ in kills.in_saves(harness, 1, rank, mode, kind, every=step):  # type: ignore[arg-type]
                    results.add(row, "resumed exactly")
            except Lost as error:
                results.add_lost(row, error)
        cut_kind(harness, results, kind, CUT_OF.format(name), 480 // every)
    try:
        for _ in kills.random_moments(harness, 1, max(1, 40 // every), "writer", longest=0.3):
            results.add(WRITER, "resumed exactly")
    except Lost as error:
        results.add_lost(WRITER, error)
    cut_kind(harness, results, "writer", CUT_OF.format("decoupled writer"), 480 // every)


def try_megatron(harness: Harness, results: Results, every: int, *, quick: bool) -> None:
    """Kills in the saves of Megatron, of the ranks and of the processes that write for them, and power cuts. Quick: of
    rank 0, in one format."""
    for kind, mode, rank, while_it in itertools.product(MEGATRON, MODES, (0, 1), ("saves", "writes")):
        if (while_it == "writes" and kind == "torch") or (quick and (kind, rank) != ("torch", 0)):
            continue
        row = (MEGATRON_ROWS if mode == "kill" else MEGATRON_WRITES)[kind]
        step = every if quick or (mode, rank, while_it) == ("kill", 0, "saves") else max(1, every // 4)
        try:
            for outcome in _of_kills(kills.in_saves(harness, 0, rank, mode, kind, every=step, while_it=while_it)):  # type: ignore[arg-type]
                results.add(row, outcome)
        except Lost as error:
            results.add_lost(row, error)
        results.save()
        print(f"{row}, rank {rank} {while_it}: {dict(results.counts.get(row, {}))}", flush=True)
    for kind, row in MEGATRON_CUTS.items():
        if not quick or kind == "torch":
            cut_kind(harness, results, kind, row, 480 // every)
            print(f"{row}: {dict(results.counts[row])}", flush=True)


def cut_kind(harness: Harness, results: Results, kind: Kind, row: str, number: int) -> None:
    """So many power cuts on every file system in a job of one kind."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="megaresume-cuts-", dir=memory) as work:
        for verdict, words in cuts.power_cuts_of(harness, Path(work), kind, number):
            if verdict in ("lost", "other bytes"):
                results.add_lost(row, Lost(f"{verdict}: {words}"))
            else:
                results.add(row, verdict)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: nothing was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.reliability", description=__doc__)
    parser.add_argument("--kills", type=int, default=330, help="at least so many; more than 330: at every ZeRO stage")
    parser.add_argument("--quick", action="store_true", help="each kind of kill at one ZeRO stage, as `make test` does")
    parser.add_argument("--trials", type=int, default=6, help="of every other fault")
    parser.add_argument("--copies", type=int, default=0, help="kill at every n-th operation among copies; 0: none")
    parser.add_argument("--kinds", type=int, default=0, help="as --copies, in saves of jobs of other kinds; 0: none")
    parser.add_argument("--megatron", type=int, default=0, help="as --kinds, in saves of Megatron-LM; 0: none")
    parser.add_argument("--damage", type=int, default=0, help="so many files, in default settings")
    parser.add_argument("--cuts", type=int, default=0, help="of the power, on every file system")
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
    # Not in place of an end, but as one: ranks are killed, and directories removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
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
        for zero, (kind, name) in enumerate(COPIES.items() if arguments.copies else (), start=1):
            try:
                for outcome in staging.in_copies(harness, zero, kind, every=arguments.copies):
                    results.add(name, outcome)
            except Lost as error:
                results.add_lost(name, error)
            results.save()
            print(f"{time.monotonic() - began:6.0f} s  {name}: {dict(results.counts[name])}", flush=True)
        for name in faults.FAULTS if arguments.trials else ():
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
        if arguments.trials:
            print(
                f"{time.monotonic() - began:6.0f} s  flips without checksums: {dict(results.counts[FLIP])}", flush=True
            )
        if arguments.kinds:
            try_kinds(harness, results, arguments.kinds)
            results.save()
            print(f"{time.monotonic() - began:6.0f} s  other kinds", flush=True)
        if arguments.megatron:
            try_megatron(harness, results, arguments.megatron, quick=arguments.quick)
        if arguments.damage:
            for name, outcome, words in damage.trials(harness, arguments.damage):
                results.add_lost(name, Lost(words)) if outcome == "lost" else results.add(name, outcome)
            results.save()
            print(f"{time.monotonic() - began:6.0f} s  {arguments.damage} files damaged", flush=True)
        if arguments.cuts and cuts.START not in results.counts:
            cut_power(harness, results, arguments.cuts)
            results.save()
            print(f"{time.monotonic() - began:6.0f} s  {arguments.cuts} power cuts on every file system", flush=True)
    if arguments.write:
        document.write(results.counts, flips=FLIP)
    print(f"{results.num_kills} kills, {len(results.lost)} lost, seed {seed}", flush=True)
    return 1 if results.lost else 0
