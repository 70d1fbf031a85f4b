"""Environments of other people's programs: each of a variable's, or one that is made here."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGES = Path(__file__).with_name("packages")
#: of each program, what the report of the tests gives the version of.
REPORTED = {
    "llamafactory": ("llamafactory", "transformers", "accelerate"),
    "swift": ("ms-swift", "transformers", "accelerate"),
    "axolotl": ("axolotl", "transformers", "accelerate"),
}


@pytest.fixture(scope="session")
def environment(
    tmp_path_factory: pytest.TempPathFactory, record_testsuite_property: Callable[[str, object], None]
) -> Callable[[str], Path]:
    """name -> the folder of the programs of an environment: MEGARESUME_NAME_PYTHON's, or of a new one.

    What is made here sees the packages of the running environment, but for those that the program wants otherwise.
    """
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            given = os.environ.get(f"MEGARESUME_{name.upper()}_PYTHON")
            python = Path(given) if given else _make(name, tmp_path_factory.mktemp(name))
            words = f"import importlib.metadata as m; print(*map(m.version, {REPORTED[name]}))"
            done = subprocess.run([python, "-c", words], capture_output=True, text=True, check=True)
            for package, version in zip(REPORTED[name], done.stdout.split(), strict=True):
                record_testsuite_property(package, version)
            made[name] = python.parent
        return made[name]

    return of


def _make(name: str, directory: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    python = directory / "bin" / "python"
    (site,) = directory.glob("lib/*/site-packages")
    (site / "parent.pth").write_text(sysconfig.get_path("purelib"))
    words = [python, "-m", "pip", "install", "-q", "--no-deps", "-r", PACKAGES / f"{name}.txt"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if name == "llamafactory":  # it imports it for audio, and its wheels are for CUDA alone
        (site / "torchaudio.py").touch()
    torchrun = python.with_name("torchrun")
    torchrun.write_text(f'#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    return python
