"""An environment that has torchtitan: the one of MEGARESUME_TORCHTITAN_PYTHON, or one that is made here."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def python(_python: str, record_testsuite_property: Callable[[str, object], None]) -> str:
    """The same; the report of the tests says which version it has."""
    words = [_python, "-c", "from importlib.metadata import version; print(version('torchtitan'))"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    record_testsuite_property("torchtitan", done.stdout.strip())
    return _python


@pytest.fixture(scope="session")
def _python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its interpreter. What is made here sees the packages of the running one, and has torchtitan besides."""
    if given := os.environ.get("MEGARESUME_TORCHTITAN_PYTHON"):
        return given
    directory = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    executable = directory / "bin" / "python"
    (site,) = directory.glob("lib/*/site-packages")
    (site / "parent.pth").write_text(sysconfig.get_path("purelib"))
    words = [executable, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", "torchtitan==0.2.2"]
    words.append("triton")  # torchtitan imports it, and a torch for CPUs does not bring it
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(executable)
