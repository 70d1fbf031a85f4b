"""Environments of other people's programs: each of a variable's, or one that is made here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environments import make_environment, versions_in

PACKAGES = Path(__file__).with_name("packages")
#: of each program, what the report of the tests gives the version of.
REPORTED = {
    "llamafactory": ("llamafactory", "transformers", "accelerate"),
    "swift": ("ms-swift", "transformers", "accelerate"),
    "axolotl": ("axolotl", "transformers", "accelerate"),
    "sentence_transformers": ("sentence-transformers", "transformers", "accelerate"),
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
            for package, version in versions_in(python, *REPORTED[name]).items():
                record_testsuite_property(package, version)
            made[name] = python.parent
        return made[name]

    return of


def _make(name: str, directory: Path) -> Path:
    python = make_environment(directory, "--no-deps", "-r", PACKAGES / f"{name}.txt")
    if name == "llamafactory":  # it imports it for audio, and its wheels are for CUDA alone
        (site,) = directory.glob("lib/*/site-packages")
        (site / "torchaudio.py").touch()
    torchrun = python.with_name("torchrun")
    torchrun.write_text(f'#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    return python
