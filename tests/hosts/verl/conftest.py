"""An environment that has VeRL: the one of MEGARESUME_VERL_PYTHON, or one that is made here."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def python(_python: str, record_testsuite_property: Callable[[str, object], None]) -> str:
    """The same; the report of the tests says which version it has."""
    words = [_python, "-c", "from importlib.metadata import version; print(version('verl'))"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    record_testsuite_property("verl", done.stdout.strip())
    return _python


@pytest.fixture(scope="session")
def _python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its interpreter. What is made here sees the packages of the running one, but for those that VeRL wants older."""
    if given := os.environ.get("MEGARESUME_VERL_PYTHON"):
        return given
    directory = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    (site,) = directory.glob("lib/*/site-packages")
    (site / "parent.pth").write_text(sysconfig.get_path("purelib"))
    kept = directory / "kept.txt"
    kept.write_text("".join(f"{name}=={version(name).partition('+')[0]}\n" for name in ("torch", "numpy")))
    words = [directory / "bin" / "python", "-m", "pip", "install", "-q", "-c", kept]
    words += ["verl==0.9.1", "TransferQueue>=0.1.10", "uvicorn", "fastapi", "cachetools", "pyzmq", "msgspec"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(Path(directory, "bin", "python"))
