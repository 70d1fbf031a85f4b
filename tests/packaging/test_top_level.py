"""What lies at the top of the repository, so that nothing is committed there by mistake."""

from __future__ import annotations

import subprocess

import pytest

from tests.packaging.conftest import ROOT

EXPECTED = """\
.ci
.gitignore
CHANGELOG.md
CONTRIBUTING.md
LICENSE
MANIFEST.in
Makefile
README.md
benchmarks
constraints.txt
docs
launch
megaresume
patches
pyproject.toml
setup.py
tests
"""


@pytest.mark.process
def test_nothing_else_is_committed_at_the_top() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("an archive of the source has no history to ask")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert sorted({path.partition("/")[0] for path in tracked.splitlines()}) == EXPECTED.splitlines()
