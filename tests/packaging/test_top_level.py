"""What lies at the top of the repository, so that nothing is committed there by mistake."""

from __future__ import annotations

import subprocess
import tomllib

import pytest
import yaml

import megaresume
from tests.packaging.conftest import ROOT

EXPECTED = """\
.ci
.github
.gitignore
CHANGELOG.md
CITATION.cff
CONTRIBUTING.md
LICENSE
MANIFEST.in
Makefile
README.md
SECURITY.md
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


def test_the_citation_names_this_version_and_license() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["version"], citation["license"]) == (megaresume.__version__, project["license"])
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project["authors"]]


@pytest.mark.parametrize("name", ["refused", "trainer", "wrong-data"])
def test_an_issue_template_asks_for_what_is_needed(name: str) -> None:
    template = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert template["name"] and template["description"]
    ids = [part["id"] for part in template["body"]]
    assert len(set(ids)) == len(ids) and all(part["attributes"]["label"] for part in template["body"])
