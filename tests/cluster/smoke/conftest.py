"""The command, as a user gives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def smoke(
    directory: Path, *words: object, script: str | None = None, timeout: float = 500, **env: str
) -> tuple[int, dict[str, Any], str]:
    """Run it with --out ``directory``/out.

    Args:
        directory: of the test.
        words: flags.
        script: text of a launch script; None: one of ours.
        timeout: seconds.
        env: on top of the environment.

    Returns:
        exit status, result.json (empty: there is none), all that was printed.
    """
    command = [sys.executable, "-m", "megaresume", "smoke", "--out", str(directory / "out"), *map(str, words)]
    if script is not None:
        (directory / "train.sh").write_text(script)
        command += ["--script", str(directory / "train.sh")]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "MEGARESUME_CACHE": str(directory / "cache")} | env
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=variables, cwd=directory)
    result = directory / "out" / "result.json"
    return done.returncode, json.loads(result.read_text()) if result.exists() else {}, done.stdout + done.stderr


def costs_steps(result: dict[str, Any], kind: str) -> bool:
    """Whether every such stop cost steps, or was said to have come right behind a checkpoint: a matter of time."""
    lost = [stop["lost"] for stop in result["stops"] if stop["kind"] == kind]
    return bool(lost) and (min(lost) > 0 or any(note.startswith(f"{kind} cost no step") for note in result["notes"]))
