"""An environment that has torchft: the running one, that of MEGARESUME_TORCHFT_PYTHON, or one that is made here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environments import make_environment

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def python(_python: str, record_testsuite_property: Callable[[str, object], None]) -> str:
    """Its interpreter; the report of the tests says which version it has."""
    words = [_python, "-c", "from importlib.metadata import version; print(version('torchft'))"]
    done = subprocess.run(words, capture_output=True, text=True)
    record_testsuite_property("torchft", done.stdout.strip() or "nightly")
    return _python


@pytest.fixture(scope="session")
def _python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What is made here sees the packages of the running one, and has torchft besides."""
    if given := os.environ.get("MEGARESUME_TORCHFT_PYTHON"):
        return given
    if importlib.util.find_spec("torchft") is not None:
        return sys.executable
    words = ("-c", ROOT / "constraints.txt", "torchft==0.2.0")
    return str(make_environment(tmp_path_factory.mktemp("venv"), *words))
