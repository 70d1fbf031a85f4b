"""`make release`: what it refuses, what it builds, and that the index can show the long description."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megaresume
from tests.packaging.conftest import ROOT, install
from tests.packaging.release import NotReady, build_files, check_tree, git, version_of
from tests.release import release

pytestmark = pytest.mark.process


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One in which everything is said for a release."""
    if not (ROOT / ".git").exists():
        pytest.skip("an archive of the source has no history")
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", ROOT, tmp_path / "checkout"], check=True)
    root = tmp_path / "checkout"
    git(root, "config", "user.name", "A tester")
    git(root, "config", "user.email", "tester@example.org")
    for tag in git(root, "tag").split():
        git(root, "tag", "-d", tag)
    for name in ("pyproject.toml", "setup.py", "CITATION.cff", "megaresume/__init__.py"):
        (root / name).write_bytes((ROOT / name).read_bytes())
    edit(root / "CHANGELOG.md", r"^## .*", f"## {megaresume.__version__} (2026-11-30)")
    git(root, "commit", "-qam", "ready", "--allow-empty")
    return root


def edit(path: Path, pattern: str, text: str) -> None:
    path.write_text(re.sub(pattern, text, path.read_text(), count=1, flags=re.MULTILINE))


def test_what_is_ready_passes(checkout: Path) -> None:
    check_tree(checkout)
    assert version_of(checkout) == megaresume.__version__


@pytest.mark.parametrize(
    ("name", "pattern", "text", "words"),
    [
        ("README.md", "^# ", "# new ", "what is changed:\n M README.md"),
        ("megaresume/__init__.py", '^__version__ = ".*"', '__version__ = "1.0-beta"', "the version is '1.0-beta'"),
        ("megaresume/__init__.py", "^__version__ = .*", "", "no line __version__"),
        ("megaresume/__init__.py", '^__version__ = ".*"', '__version__ = "99.0.0"', "CITATION.cff has version"),
        (
            "CHANGELOG.md",
            "^## .*",
            "## 0.1.0 (unreleased)",
            "the first heading of CHANGELOG.md is '0.1.0 (unreleased)': write the day of the release",
        ),
        ("pyproject.toml", r"^dynamic = .*", 'version = "0.1.0"\ndynamic = ["readme"]', "a version of its own"),
    ],
)
def test_what_is_not_ready_is_named(checkout: Path, name: str, pattern: str, text: str, words: str) -> None:
    edit(checkout / name, pattern, text)
    if name != "README.md":
        git(checkout, "commit", "-qam", "not ready")
    with pytest.raises(NotReady, match=re.escape(words)):
        check_tree(checkout)


def test_a_part_is_not_all(checkout: Path) -> None:
    words = [sys.executable, "-m", "tests.packaging.release", "--only", "tree"]
    env = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(words, cwd=checkout, env=env, capture_output=True, text=True)
    said = "passed; not ready before these have, too: build, describe, install, test"
    assert done.returncode == 0 and said in done.stdout and "upload" not in done.stdout, done.stdout + done.stderr


def test_a_version_is_released_once(checkout: Path) -> None:
    git(checkout, "tag", f"v{megaresume.__version__}")
    with pytest.raises(NotReady, match="raise __version__"):
        check_tree(checkout)


def test_only_what_is_committed_is_built(checkout: Path) -> None:
    edit(checkout / "megaresume" / "__init__.py", '^__version__ = ".*"', '__version__ = "3.2.1"')
    git(checkout, "commit", "-qam", "3.2.1")
    (checkout / "megaresume" / "not_committed.py").touch()
    (checkout / "dist").mkdir()
    (checkout / "dist" / "megaresume-0.0.1.tar.gz").touch()
    archive, wheel = build_files(checkout)
    assert (archive.name, wheel.name) == ("megaresume-3.2.1.tar.gz", "megaresume-3.2.1-py3-none-any.whl")
    assert sorted(path.name for path in (checkout / "dist").iterdir()) == [wheel.name, archive.name]
    listed = subprocess.run([sys.executable, "-m", "zipfile", "-l", wheel], capture_output=True, text=True, check=True)
    assert "megaresume/__init__.py" in listed.stdout and "not_committed.py" not in listed.stdout


@release(
    "downloads twine",
    "`tests/packaging/test_wheel.py::test_the_wheel`",
)
def test_the_index_can_show_the_description(built: tuple[Path, Path], tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    install(tmp_path, "twine")
    words = [tmp_path / "bin" / "python", "-m", "twine", "check", "--strict", *built]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr
