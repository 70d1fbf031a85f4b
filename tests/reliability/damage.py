"""Damage of every kind in every kind of file of durable checkpoints, loaded in default settings: is any unnoticed?

Two ranks load from hundreds of damaged directories, one after the other, and make a step after each load. What they
restored is held against a job that was never interrupted: a checkpoint is loaded exactly, or not at all.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.reliability.faults import NEWEST, SAVES, checkpoints
from tests.reliability.harness import Harness, Lost, Outcome, Run
from tests.reliability.job import BATCH, WORLD_SIZE, Task

#: bytes that a disk, and the memory of a system, lose together.
_SECTOR, _PAGE = 512, 4096
#: loads of one job.
_MOST = 80

#: kind of file -> patterns of its files in the newest checkpoint.
FILES = {
    "weights": [f"global_step{NEWEST}/*_model_states.pt"],
    "client state": [f"global_step{NEWEST}/*_model_states.pt"],
    "optimizer": [f"global_step{NEWEST}/*_optim_states.pt"],
    "random state": [f"megaresume/step_{NEWEST:07d}.random/*"],
    "data state": [f"megaresume/step_{NEWEST:07d}.json"],
    "manifest": [f"megaresume/step_{NEWEST:07d}.manifest.json"],
    "ledger": ["megaresume/ledger.jsonl"],
    "pointers": ["latest", "latest_checkpointed_iteration.txt"],
}
#: the steps from which a start may go on then: a bit in the white space of a record may be of no consequence.
_ALLOWED = {
    **{kind: {SAVES[-2]} for kind in ("weights", "client state", "optimizer", "random state")},
    **{kind: {SAVES[-2], NEWEST} for kind in ("data state", "manifest")},
    **{kind: {NEWEST} for kind in ("ledger", "pointers")},
}


def _flip(data: bytearray, at: int, older: bytes, rng: random.Random) -> None:
    data[at] ^= 1 << rng.randrange(8)


def _zero(data: bytearray, at: int, older: bytes, rng: random.Random) -> None:
    at -= at % _PAGE
    data[at : at + _PAGE] = bytes(len(data[at : at + _PAGE]))


def _cut(data: bytearray, at: int, older: bytes, rng: random.Random) -> None:
    del data[at:]


def _stale(data: bytearray, at: int, older: bytes, rng: random.Random) -> None:
    at -= at % _SECTOR
    data[at : at + _SECTOR] = older[at : at + _SECTOR].ljust(len(data[at : at + _SECTOR]), b"\0")


def _swap(data: bytearray, at: int, older: bytes, rng: random.Random) -> None:
    data[:] = older


#: row of the table -> the damage, at a place in a file; ``older``: that file of the checkpoint before.
ROWS: dict[str, Callable[[bytearray, int, bytes, random.Random], None]] = {
    "a bit flipped in any file": _flip,
    "a page of zeros in any file": _zero,
    "any file cut short": _cut,
    "a sector of the checkpoint before in any file": _stale,
    "any file of the checkpoint before": _swap,
}


#: row of the table for what `_exchange` does.
EXCHANGED = "whole files, directories or records exchanged"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One damaged directory."""

    row: str
    #: the steps from which a start may go on.
    allowed: set[int]
    directory: Path
    #: what was done, for messages.
    words: str


def _older_name(path: Path) -> Path:
    """The same file of the checkpoint before; of the ledger and the pointers, itself."""
    before = SAVES[-2]
    text = str(path).replace(f"global_step{NEWEST}", f"global_step{before}")
    return Path(text.replace(f"step_{NEWEST:07d}", f"step_{before:07d}"))


def _damage(base: Path, directory: Path, row: str, kind: str, rng: random.Random) -> Trial:
    shutil.copytree(base, directory)
    while True:
        path = rng.choice(sorted(path for pattern in FILES[kind] for path in directory.glob(pattern)))
        data = bytearray(path.read_bytes())
        first, last = 0, len(data)
        if kind == "client state":
            first = data.find(b"client state of step")
            if first < 0:  # of another rank
                continue
            last = data.rfind(b"client state of step")
        at = rng.randrange(first, last)
        older = _older_name(path).read_bytes()
        if kind in ("ledger", "pointers"):
            older = rng.choice((b"", b"2", b"global_step2", older[: len(older) // 2]))
        before = bytes(data)
        ROWS[row](data, at, older, rng)
        if data == before:  # the same in both checkpoints
            _flip(data, at, older, rng)
        path.write_bytes(data)
        words = f"{row}: {path.relative_to(directory)}, byte {at}"
        return Trial(row=row, allowed=_ALLOWED[kind], directory=directory, words=words)


def _exchange(base: Path, directory: Path, rng: random.Random) -> Trial:
    """What somebody does who tidies up by hand."""
    shutil.copytree(base, directory)
    first, before, newest = (directory / f"global_step{step}" for step in SAVES)
    how = rng.choice(("tags", "copied", "copied with records", "ranks", "renamed"))
    allowed = {SAVES[-2]}
    if how in ("tags", "ranks"):
        one, two = (before, newest) if how == "tags" else sorted(newest.glob("*zero_pp_rank_*_optim_states.pt"))
        aside = directory / "aside"
        for source, target in ((one, aside), (two, one), (aside, two)):
            source.rename(target)
        allowed = {SAVES[0]} if how == "tags" else allowed
    elif how == "renamed":
        first.rename(directory / "global_step8")
        allowed = {NEWEST}
    else:
        shutil.rmtree(newest)
        shutil.copytree(before, newest)
        records = directory / "megaresume"
        for kind in (".json", ".manifest.json") if how == "copied with records" else ():
            shutil.copy(records / f"step_{SAVES[-2]:07d}{kind}", records / f"step_{NEWEST:07d}{kind}")
    return Trial(row=EXCHANGED, allowed=allowed, directory=directory, words=f"{EXCHANGED}: {how}")


def _judge(harness: Harness, zero: int, run: Run, number: int, trial: Trial) -> Outcome:
    twin = harness.twin(zero, NEWEST + 2)
    for rank in range(WORLD_SIZE):
        lines: list[dict[str, Any]] = [line for line in run.reports[rank] if line.get("number") == number]
        if not lines:
            raise Lost(f"rank {rank} said nothing; {run.ends}, {run.errors[-1:]}")
        if lines[0]["what"] == "refused":
            raise Lost(f"rank {rank} refused: {lines[0]['text']}")
        begun, after = lines
        step = begun["step"]
        if step not in trial.allowed:
            raise Lost(f"rank {rank} went on from step {step}, expected one of {sorted(trial.allowed)}")
        steps = {line["step"]: line for line in twin.said(rank, "step")}
        if (begun["samples"], begun["content"], begun["client"]) != (step * BATCH, steps[step]["content"], True):
            raise Lost(f"rank {rank} restored other weights, moments, samples or client state than step {step} had")
        if {key: after[key] for key in steps[step + 1]} != steps[step + 1]:
            raise Lost(f"rank {rank} trained {after}, the twin {steps[step + 1]}")
    return "resumed exactly"


def trials(harness: Harness, number: int) -> Iterator[tuple[str, Outcome, str]]:
    """Row of the table, what came of it, and what should not have been.

    Args:
        harness: of the jobs.
        number: of damaged files; their kinds, those of damage and the ZeRO stages come in turn. For every eight there
            is one directory in which things are exchanged.
    """
    kinds = [(row, kind) for kind in FILES for row in ROWS]
    for first in range(0, number, _MOST):
        zero = (1, 3, 2)[first // _MOST % 3]
        base = checkpoints(harness, zero)
        chosen = [
            _damage(base, harness.new_directory(), *kinds[index % len(kinds)], harness.random)
            for index in range(first, min(first + _MOST, number))
        ]
        chosen += [_exchange(base, harness.new_directory(), harness.random) for _ in range(len(chosen) // 8)]
        loads = tuple(trial.directory for trial in chosen)
        try:
            run = harness.run(Task(zero=zero, data=harness.data(), directory=base, stop=NEWEST + 1, loads=loads))
        except Lost as error:
            yield chosen[0].row, "lost", f"seed {harness.seed}, ZeRO {zero}, one of {len(chosen)}: {error}"
            continue
        for index, trial in enumerate(chosen):
            try:
                yield trial.row, _judge(harness, zero, run, index, trial), ""
            except Lost as error:
                yield trial.row, "lost", f"seed {harness.seed}, ZeRO {zero}, {trial.words}: {error}"
            shutil.rmtree(trial.directory)
