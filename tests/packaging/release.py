"""Everything that a release needs, up to the upload: ``make release``.

    tree      nothing uncommitted; the version is new, and the same in CITATION.cff and CHANGELOG.md
    build     the archive from what is committed, the wheel from the archive, into dist/
    describe  the index can show the long description
    install   the wheel in a fresh environment proves a small run
    test      make test-all, with every extra alone on every Python that is here

Stops at the first that fails. ``--only tree build`` repeats a part.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.packaging.conftest import ROOT, SAVE, build, make_environment


class NotReady(Exception):
    """What has to be done first."""


def git(root: Path, *words: str) -> str:
    """What it prints. Raises CalledProcessError."""
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout


def version_of(root: Path) -> str:
    """The one place that has it."""
    found = re.search(r'^__version__ = "(.+)"$', (root / "megaresume" / "__init__.py").read_text(), re.MULTILINE)
    if found is None:
        raise NotReady('megaresume/__init__.py has no line __version__ = "..."')
    return found[1]


def check_tree(root: Path) -> None:
    """Raises NotReady."""
    if changed := git(root, "status", "--porcelain"):
        raise NotReady(f"commit, or put away, what is changed:\n{changed}")
    version = version_of(root)
    if re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version) is None:
        raise NotReady(f"the version is {version!r}: expected 1.2.3 or 1.2.3rc1, in megaresume/__init__.py")
    if git(root, "tag", "--list", f"v{version}"):
        raise NotReady(
            f"{version} was released, the tag v{version} is there: raise __version__ in megaresume/__init__.py"
        )
    if "version" not in tomllib.loads((root / "pyproject.toml").read_text())["project"]["dynamic"]:
        raise NotReady("pyproject.toml has a version of its own: it is taken from megaresume/__init__.py")
    if (cited := str(yaml.safe_load((root / "CITATION.cff").read_text())["version"])) != version:
        raise NotReady(f"CITATION.cff has version {cited}, and megaresume/__init__.py {version}")
    heading = next(re.finditer(r"^## (.+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE))[1]
    if re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading) is None:
        raise NotReady(
            f"the first heading of CHANGELOG.md is {heading!r}: write the day of the release, "
            f"'## {version} (2026-11-30)', and commit it"
        )


def build_files(root: Path) -> list[Path]:
    """dist/ with the archive and the wheel, of what is committed."""
    dist = root / "dist"
    for old in dist.glob("megaresume-*"):
        old.unlink()
    dist.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        git(root, "clone", "--quiet", "--no-hardlinks", ".", f"{scratch}/source")
        return list(build(Path(scratch, "source"), dist))


def describe(root: Path) -> None:
    """Raises CalledProcessError."""
    files = [str(path) for path in (root / "dist").glob("megaresume-*")]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)


def install_wheel(root: Path) -> None:
    """Raises NotReady."""
    (wheel,) = (root / "dist").glob("megaresume-*.whl")
    with tempfile.TemporaryDirectory() as directory:
        run = make_environment(Path(directory), wheel)
        for words, program in ((["-c", SAVE], "python"), (["verify", "save", "--data", "data.yaml"], "megaresume")):
            status, text = run(*words, program=program)
            if status != 0:
                raise NotReady(f"{wheel.name} does not work in a fresh environment: {text}")


def test_all(root: Path) -> None:
    """Raises CalledProcessError."""
    subprocess.run(["make", "test-all"], cwd=root, check=True)


STEPS: dict[str, Callable[[Path], object]] = {
    "tree": check_tree,
    "build": build_files,
    "describe": describe,
    "install": install_wheel,
    "test": test_all,
}


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description="Check and build a release; nothing is uploaded.")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS))
    only = parser.parse_args().only
    for name in only:
        print(f"release: {name}", flush=True)
        try:
            STEPS[name](ROOT)
        except (NotReady, subprocess.CalledProcessError) as error:
            print(f"release: not ready: {error}", file=sys.stderr)
            return 1
    if missing := [name for name in STEPS if name not in only]:
        print(f"release: passed; not ready before these have, too: {', '.join(missing)}")
        return 0
    version = version_of(ROOT)
    print(f"release: {version} is ready in dist/; nothing was uploaded. What is left to do:")
    print(f"  git tag -a v{version} -m {version} && git push origin v{version}")
    print("  .venv/bin/python -m twine upload dist/*")
    return 0


if __name__ == "__main__":
    sys.exit(main())
