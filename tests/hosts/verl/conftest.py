"""An environment that has VeRL: the one of MEGARESUME_VERL_PYTHON, or one that is made here."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version

import pytest

from tests.environments import make_environment, versions_in


@pytest.fixture(scope="session")
def python(_python: str, record_testsuite_property: Callable[[str, object], None]) -> str:
    """The same; the report of the tests says which version it has."""
    record_testsuite_property("verl", versions_in(_python, "verl")["verl"])
    return _python


@pytest.fixture(scope="session")
def _python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its interpreter. What is made here sees the packages of the running one, but for those that VeRL wants older."""
    if given := os.environ.get("MEGARESUME_VERL_PYTHON"):
        return given
    directory = tmp_path_factory.mktemp("venv")
    kept = directory.with_name("kept.txt")
    kept.write_text("".join(f"{name}=={version(name).partition('+')[0]}\n" for name in ("torch", "numpy")))
    needed = ("TransferQueue>=0.1.10", "uvicorn", "fastapi", "cachetools", "pyzmq", "msgspec")
    return str(make_environment(directory, "-c", kept, "verl==0.9.1", *needed))
