"""Is the suite strong enough? Put in each seeded defect by itself, and run the tests that must find it.

    python -m tests.mutations             all of them (half an hour on one core)
    python -m tests.mutations count       those that have this in the path of their file, or in their name
    python -m tests.mutations -j 2        two at a time

Each runs on a copy of the checkout. Exit status 1 if one survives, or if its tests fail without it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutations.seeded import SEEDED, Mutation

ROOT = Path(__file__).resolve().parents[2]
#: of the tests of one defect; one that makes them hang is found.
PATIENCE_SECONDS = 300
COPIED = ("megaresume", "tests", "docs", "launch", "patches", "pyproject.toml", "README.md")


def copy(target: Path) -> None:
    """The parts of the checkout that tests read."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            shutil.copy2(source, target / name)


def passes(tree: Path, tests: tuple[str, ...]) -> bool:
    """Whether the tests pass on a copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(tests)} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def survives(mutation: Mutation) -> bool:
    """Whether its tests pass although it is put in."""
    with tempfile.TemporaryDirectory(prefix="megaresume-mutation-") as folder:
        tree = Path(folder)
        copy(tree)
        mutation.apply(tree)
        return passes(tree, mutation.tests)


def main() -> int:
    """Exit status: 0 if every defect is found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("part", nargs="?", default="", help="of the path of the file, or of the defect's name")
    parser.add_argument("-j", type=int, default=1, help="how many at a time")
    arguments = parser.parse_args()
    chosen = [mutation for mutation in SEEDED if arguments.part in f"{mutation.path}: {mutation}"]
    named = tuple(sorted({test for mutation in chosen for test in mutation.tests}))
    if not passes(ROOT, named):
        print("these tests fail without any mutation")
        return 1
    alive = 0
    with ThreadPoolExecutor(arguments.j) as pool:
        for number, (mutation, lives) in enumerate(zip(chosen, pool.map(survives, chosen), strict=True), 1):
            alive += lives
            print(f"{number:3d}/{len(chosen)} {'SURVIVES' if lives else 'found   '} {mutation}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} found")
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main())
