"""From launch to the end of the first step: whole programs, fresh and resumed, beside the same ones without us.

Processor time of the process and its children: imports, compiled loops from their cache, opening the data, planning,
loading a checkpoint, the first batch. A fresh one is not the first on the machine: compiled loops are kept.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.first_step_program import PROGRAMS
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import interleaved, median

PROGRAM = Path(__file__).with_name("first_step_program.py")
MOST_SECONDS = 0.3


def children() -> float:
    """Seconds of processor time of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rows(setup: Setup) -> Iterator[Row]:
    """Each trainer whose package is here, and a stream of all documents of `Setup.lengths`."""
    for name in PROGRAMS:
        if name == "stream":
            what = f"torch, packed samples of {setup.sizes.most_documents:,} documents"
            yield from _rows_of(what, name, setup, str(setup.lengths))
        elif importlib.util.find_spec(name):
            yield from _rows_of(name, name, setup)


def _rows_of(what: str, name: str, setup: Setup, *more: str) -> Iterator[Row]:
    directory = setup.directory / f"first-step-{name}"
    saved = {side: directory / f"{side}-saved" for side in ("ours", "alone")}
    for side, path in saved.items():
        path.mkdir(parents=True)
        _run(name, side, path, *more)

    def fresh(side: str) -> Callable[[int], None]:
        def run(repetition: int) -> None:
            path = directory / f"{side}-{repetition}"
            path.mkdir()
            _run(name, side, path, *more)

        return run

    def resumed(side: str) -> Callable[[int], None]:
        def run(repetition: int) -> None:
            path = directory / f"{side}-resumed-{repetition}"
            shutil.copytree(saved[side], path)
            _run(name, side, path, *more)

        return run

    for state, start in (("fresh", fresh), ("resumed", resumed)):
        sides = {side: start(side) for side in ("ours", "alone")}
        seconds = interleaved(sides, setup.sizes.slow_repetitions, clock=children, warm_up=False)
        ours, alone = median(seconds["ours"]), median(seconds["alone"])
        yield Row(
            what=f"first step, {what}, {state}: launch to its end",
            ours=ours,
            unit="s",
            baseline=alone,
            against="the same program without megaresume",
            must=f"at most {MOST_SECONDS} s more",
            holds=ours - alone <= MOST_SECONDS,
        )


def _run(*words: object) -> None:
    env = os.environ | {"PYTHONPATH": str(PROGRAM.parents[1])}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    subprocess.run([sys.executable, str(PROGRAM), *map(str, words)], check=True, env=env, stdout=subprocess.DEVNULL)
