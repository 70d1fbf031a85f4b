"""One command makes all kills and faults; the tests look at what it counted, each at its own part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.release import release

#: flags of the command: for `make test`, and for `make test-all`.
_QUICK = "--quick --kills 1 --trials 1 --copies 24 --damage 40 --kinds 80 --megatron 64"
_WHOLE = "--trials 4 --copies 1 --damage 400 --kinds 4 --megatron 4"
QUICK, WHOLE = _QUICK.split(), _WHOLE.split()


RELEASE = release(
    "`[whole]`: 330 kills at all ZeRO stages, every operation among copies, four trials of each fault, 400 "
    "damaged files, every fourth operation under attached loaders, pipelines and Megatron",
    "the same, `[quick]`: 65 kills, each kind at one stage, every sixth operation of a save, every 24th "
    "among copies, one trial, 40 files, every 80th operation under attached loaders and pipelines, every "
    "64th under Megatron, in the format torch alone",
)


@pytest.fixture(scope="session", params=["quick", pytest.param("whole", marks=RELEASE)])
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `python -m tests.reliability` counted: fault -> outcome -> times, and a line for everything lost."""
    quick = request.param == "quick"
    path = tmp_path_factory.mktemp("reliability") / "results.json"
    command = [sys.executable, "-m", "tests.reliability", "--results", path, *(QUICK if quick else WHOLE)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert path.exists(), done.stdout + done.stderr
    found = json.loads(path.read_text())
    found["output"] = done.stdout + done.stderr
    found["status"] = done.returncode
    found["quick"] = quick
    return found
