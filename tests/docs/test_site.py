"""The site that `make docs` builds: every page is in its table of contents, every link and anchor leads somewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.process
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "-q", "docs", str(tmp_path / "site")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "site/api.html").read_text()
    # Signatures and docstrings, not names alone.
    assert 'id="megaresume.attach"' in api and "has a section for each trainer" in api
    assert (tmp_path / "site/_images/killed-three-times.svg").is_file()
