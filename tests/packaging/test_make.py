"""`make check` and `make test` say how long they took and how long they may take, and end as the tests did."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("target", "bound", "fails"), [("check", 3, None), ("test", 15, None), ("test", 15, "python"), ("test", 15, "mypy")]
)
def test_how_long_it_took_is_said(tmp_path: Path, target: str, bound: int, fails: str | None) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("ruff", "lint-imports", "mypy", "python"):  # so that nothing is run
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\necho {name} was run\nexit {int(name == fails)}\n")
        program.chmod(0o755)
    (tmp_path / ".installed").touch()
    words = ["make", target, f"VENV={tmp_path}", f"STARTED={int(time.time()) - 1000}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    said = rf"^make {target} took 16 min [45]\d s; bound: {bound} min on two idle cores$"
    assert re.search(said, done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert "mypy was run" in done.stdout
    assert (done.returncode == 0) == (fails is None)
