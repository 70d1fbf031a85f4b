"""One command makes all kills and faults; the tests look at what it counted, each at its own part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `python -m tests.reliability` counted: fault -> outcome -> times, and a line for everything lost."""
    path = tmp_path_factory.mktemp("reliability") / "results.json"
    command = [sys.executable, "-m", "tests.reliability", "--results", path, "--trials", "4"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert path.exists(), done.stdout + done.stderr
    found = json.loads(path.read_text())
    found["output"] = done.stdout + done.stderr
    found["status"] = done.returncode
    return found
