"""An environment that has torchtitan: the one of MEGARESUME_TORCHTITAN_PYTHON, or one that is made here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environments import make_environment, versions_in

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def python(_python: str, record_testsuite_property: Callable[[str, object], None]) -> str:
    """The same; the report of the tests says which version it has."""
    record_testsuite_property("torchtitan", versions_in(_python, "torchtitan")["torchtitan"])
    return _python


@pytest.fixture(scope="session")
def _python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its interpreter. What is made here sees the packages of the running one, and has torchtitan besides."""
    if given := os.environ.get("MEGARESUME_TORCHTITAN_PYTHON"):
        return given
    # torchtitan imports triton, which a torch for CPUs does not bring.
    words = ("-c", ROOT / "constraints.txt", "torchtitan==0.2.2", "triton")
    return str(make_environment(tmp_path_factory.mktemp("venv"), *words))
