"""From launch to the end of the first step: whole programs, fresh and resumed, beside the same ones without us.

Processor time of all processes of a program: imports, compiled loops from their cache, opening the data, planning,
loading a checkpoint, the first batch. Neither saves. A fresh one is not the first on the machine: compiled loops are
kept.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.corpora import VOCABULARY, WEIGHTS
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import children, interleaved, median
from megaresume.cluster.processes import free_port

ROOT = Path(__file__).parents[1]
#: a stand-in for Megatron-LM's training package over the megatron-core that is installed.
MEGATRON = ROOT / "tests" / "hosts" / "megatron" / "mini"
#: runs a module, or a script's file, and ends at once: what ending costs belongs to no first step.
AND_LEAVE = """
import multiprocessing, os, runpy, sys
del sys.argv[0]
try:
    if sys.argv[0].endswith(".py"):
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as end:
    if end.code:
        raise
sys.stdout.flush()
for child in multiprocessing.active_children():  # of Megatron's saves: it would stay for ever
    child.kill()
os._exit(0)
"""
MOST_SECONDS = 0.3
#: the words after ``python``, given "ours" or "alone"; "fresh", "saving" (after its first step) or "resumed"; and the
#: directory of its checkpoints.
Words = Callable[[str, str, Path], Sequence[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is started."""

    what: str
    words: Words
    #: processes; None: one, without the variables of a launcher.
    ranks: int | None = None


def rows(setup: Setup) -> Iterator[Row]:
    """Each program whose trainer is installed."""
    for number, program in enumerate(_programs(setup)):
        yield from _rows_of(program, setup.directory / f"first-step-{number}", setup.sizes.slow_repetitions)


def _programs(setup: Setup) -> Iterator[Program]:
    yield Program(what="torch", words=_loop("torch"))
    yield Program(what="torch, 2 ranks (each)", words=_loop("torch"), ranks=2)
    documents = f"torch, packed samples of {setup.sizes.most_documents:,} documents"
    yield Program(what=documents, words=_loop("stream", setup.lengths))
    if importlib.util.find_spec("transformers"):
        yield Program(what="transformers", words=_loop("transformers"))
    if importlib.util.find_spec("deepspeed"):
        yield Program(what="deepspeed", words=_loop("deepspeed"), ranks=1)
    if importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core"):
        yield Program(what="Megatron", words=_megatron(setup), ranks=1)


def _loop(trainer: str, *more: object) -> Words:
    program = Path(__file__).with_name("first_step_program.py")
    return lambda side, state, directory: (program, trainer, side, state, directory, *more)


def megatron_data(setup: Setup) -> dict[str, list[object]]:
    """Flags: the stream of a data.yaml, "ours", or Megatron's own datasets over the same corpora, "alone"."""
    sources = {name: {"path": str(setup.corpora[name]), "weight": weight} for name, weight in WEIGHTS.items()}
    config = setup.directory / "megatron.yaml"
    config.write_text(json.dumps({"sources": sources}))
    blend = [word for name, weight in WEIGHTS.items() for word in (weight, setup.corpora[name])]
    shared = ["--seq-length", 32, "--vocab-size", VOCABULARY, "--micro-batch-size", 8, "--global-batch-size", 8]
    own = ["--data-path", *blend, "--split", "90,5,5", "--data-cache-path", setup.directory / "megatron-indexes"]
    return {"ours": [*shared, "--megaresume-data", config], "alone": [*shared, *own]}


def _megatron(setup: Setup) -> Words:
    data, script = megatron_data(setup), MEGATRON / "pretrain_from_0_19.py"
    lasts = {"fresh": ["--train-iters", 1], "saving": ["--train-iters", 2, "--exit-interval", 1]}
    lasts["resumed"] = ["--train-iters", 2]

    def words(side: str, state: str, directory: Path) -> Sequence[object]:
        places = ["--save", directory, "--load", directory, "--mini-log", directory / "log"]
        launcher = ["megaresume.run"] if side == "ours" else []
        return ["-c", AND_LEAVE, *launcher, script, *data[side], *lasts[state], *places]

    return words


def _rows_of(program: Program, directory: Path, repetitions: int) -> Iterator[Row]:
    saved = {side: directory / f"{side}-saved" for side in ("ours", "alone")}
    for side, path in saved.items():
        path.mkdir(parents=True)
        _run(program.words(side, "saving", path), program.ranks)

    def start(side: str, state: str, repetition: int) -> None:
        path = directory / f"{side}-{state}-{repetition}"
        if state == "resumed":
            shutil.copytree(saved[side], path)
        else:
            path.mkdir()
        _run(program.words(side, state, path), program.ranks)

    for state in ("fresh", "resumed"):
        sides = {side: partial(start, side, state) for side in saved}
        seconds = interleaved(sides, repetitions, clock=children, warm_up=False)
        ranks = program.ranks or 1
        alone = median(seconds["alone"]) / ranks
        more = median(a - b for a, b in zip(seconds["ours"], seconds["alone"], strict=True)) / ranks
        yield Row(
            what=f"first step, {program.what}, {state}: launch to its end",
            ours=alone + more,
            unit="s",
            baseline=alone,
            against="the same program without megaresume",
            must=f"at most {MOST_SECONDS} s more",
            holds=more <= MOST_SECONDS,
        )


def ranks_at(number: int) -> list[dict[str, str]]:
    """The environments of so many ranks on this machine, which meet at a free port."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [address | {"RANK": str(k), "LOCAL_RANK": str(k), "WORLD_SIZE": str(number)} for k in range(number)]


def _run(words: Sequence[object], ranks: int | None) -> None:
    """Run the processes of a program to their ends."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    launched: list[dict[str, str]] = [{}] if ranks is None else ranks_at(ranks)
    command = [sys.executable, *map(str, words)]
    running = [subprocess.Popen(command, env=env | one, stdout=subprocess.DEVNULL) for one in launched]
    statuses = [process.wait() for process in running]
    if any(statuses):
        raise SystemExit(f"benchmarks: {' '.join(command)} failed")
