"""Runs whose number of ranks changes, each once a session; many tests look at them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def run(launch: Any) -> Any:
    """``run(num_processes, *arguments)``: what rank 0 of elastic_toy.py found, by case."""

    def results(num_processes: int, *arguments: object) -> dict[str, Any]:
        status, output = launch(str(HERE / "elastic_toy.py"), *arguments, num_processes=num_processes)
        lines = [line.removeprefix("RESULT ") for line in output.splitlines() if line.startswith("RESULT ")]
        found = {name: json.loads(value)[0] for name, value in (line.split(" ", 1) for line in lines)}
        return found | {"status": status, "output": output}

    return results


@pytest.fixture(scope="session")
def elastic_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where those runs save: one checkpoint root for each case."""
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture(scope="session")
def whole(run: Any, data_yaml: Path, elastic_root: Path) -> dict[str, Any]:
    """Two ranks, 14 steps without a break; saved at step 4, then killed."""
    return run(2, data_yaml, elastic_root, "first", 14, 4, 0)


@pytest.fixture(scope="session")
def kept(whole: dict[str, Any], elastic_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what they left, before anybody goes on from it."""
    import shutil

    copy = tmp_path_factory.mktemp("kept") / "elastic"
    shutil.copytree(elastic_root, copy)
    return copy


@pytest.fixture(scope="session")
def one(run: Any, data_yaml: Path, elastic_root: Path, whole: dict[str, Any], kept: Path) -> dict[str, Any]:
    """One rank goes on from step 4, and saves at 8."""
    return run(1, data_yaml, elastic_root, "second", 14, 4, 8)


@pytest.fixture(scope="session")
def two(run: Any, data_yaml: Path, elastic_root: Path, one: dict[str, Any]) -> dict[str, Any]:
    """Two ranks go on from step 8 of the one rank, and save at 11."""
    return run(2, data_yaml, elastic_root, "second", 14, 8, 11)
