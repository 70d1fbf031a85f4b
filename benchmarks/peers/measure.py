"""The runs of one tool: undisturbed, killed at random steps, and resumed with each change."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.launch import Plan, copy, prepare, run
from benchmarks.peers.recorder import Steps, count, read, survived
from benchmarks.peers.scenario import BEFORE, CHANGES, EPOCHS, Layout
from benchmarks.peers.tools import TOOLS


def versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """Of the distributions in an environment."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "print(json.dumps({name: m.version(name) for name in sys.argv[1:] if name != 'megaresume'}))"
    )
    done = subprocess.run([python, "-c", code, *packages], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def measure(name: str, python: str, directory: Path, kills: Sequence[int]) -> dict[str, Any]:
    """All runs of a tool.

    Args:
        name: of the tool.
        python: interpreter of its environment.
        directory: for its files.
        kills: steps after which rank 0 kills itself.

    Returns:
        ``{"versions", "documentation", "undisturbed": {"repeated", "never"}, "changes": {change: [result, ...]}}``,
        with a result for each kill: ``{"kill_after", "resumed_from", "repeated", "never", "same_steps"}``, or
        ``{"kill_after", "error", "refused"}``. ``repeated`` and ``never`` are per cent of an epoch's samples;
        ``same_steps``: every step trained the samples that it trains in the undisturbed run (None: its steps are of
        another size).
    """
    tool = TOOLS[name]

    def plan(run_directory: Path, life: int, layout: Layout, kill_after: int | None = None) -> Plan:
        data = directory / "data"
        return Plan(tool=name, layout=layout, directory=run_directory, data=data, life=life, kill_after=kill_after)

    def grow(layout: Layout) -> None:
        if tool.prepare is not None:
            prepare(python, plan(directory / "prepare", 0, layout))

    grow(BEFORE)
    undisturbed = plan(directory / "undisturbed", 1, BEFORE)
    failed = run(python, undisturbed)
    if failed is not None:
        raise RuntimeError(f"{name}: an undisturbed run fails: {failed}")
    life = read(undisturbed.directory / "records", 1)
    assert life is not None
    reference = life.steps
    repeated, never = count(reference, epochs=EPOCHS, items=BEFORE.items)
    killed = {step: directory / f"killed-{step}" for step in kills}
    for step, path in killed.items():
        failed = run(python, plan(path, 1, BEFORE, step))
        if failed is not None:
            raise RuntimeError(f"{name}: the run that is to be killed fails: {failed}")
    results: dict[str, list[dict[str, Any]]] = {}
    for change, layout in CHANGES.items():
        if layout.items != BEFORE.items:
            grow(layout)
        for step, path in killed.items():
            resumed = directory / f"{change}-{step}".replace(" ", "-")
            copy(path, resumed)
            failed = run(python, plan(resumed, 2, layout))
            result = _result(resumed, failed, layout, reference) | {"kill_after": step}
            if failed is not None:
                result["refused"] = any(part in failed for part in tool.refusals)
            results.setdefault(change, []).append(result)
            print(f"peers: {name}, {change}: {result}", file=sys.stderr, flush=True)
            shutil.rmtree(resumed)
    return {
        "versions": versions(python, tool.packages),
        "documentation": list(tool.documentation),
        "undisturbed": {"repeated": repeated, "never": never},
        "changes": results,
    }


def _result(directory: Path, failed: str | None, layout: Layout, reference: Steps) -> dict[str, Any]:
    if failed is not None:
        return {"error": failed}
    lives = [life for number in (1, 2) if (life := read(directory / "records", number)) is not None]
    steps = survived(lives)
    repeated, never = count(steps, epochs=EPOCHS, items=BEFORE.items)
    comparable = layout.global_batch == BEFORE.global_batch and layout.items == BEFORE.items
    same = {step: Counter(samples) for step, samples in steps.items() if samples} == {
        step: Counter(samples) for step, samples in reference.items() if samples
    }
    return {
        "resumed_from": lives[-1].start,
        "repeated": round(repeated, 2),
        "never": round(never, 2),
        "same_steps": same if comparable else None,
    }
