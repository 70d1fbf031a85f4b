"""`make check` and `make test` say how long they took and how long they may take, and end as the tests did."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("target", "status", "bound"), [("check", 0, 3), ("test", 0, 15), ("test", 1, 15)])
def test_how_long_it_took_is_said(tmp_path: Path, target: str, status: int, bound: int) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("ruff", "lint-imports", "mypy", "python"):  # so that nothing is run
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\nexit {status if name == 'python' else 0}\n")
        program.chmod(0o755)
    (tmp_path / ".installed").touch()
    words = ["make", target, f"VENV={tmp_path}", f"STARTED={int(time.time()) - 1000}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    said = rf"^make {target} took 16 min [45]\d s; bound: {bound} min on two idle cores$"
    assert re.search(said, done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert (done.returncode == 0) == (status == 0)
