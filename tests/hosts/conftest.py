"""Corpora for these tests, and real DeepSpeed engines over gloo processes: a few launches, shared by many tests."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megaresume.cluster.processes import Launcher, LocalJob
from megaresume.hosts.driver import copied, items, trained
from tests.corpora import progressions

HERE = Path(__file__).parent
VOCAB = 64


def write_corpus(prefix: Path, *, documents: int, seed: int, mean: int = 40) -> None:
    """Documents of ``mean`` tokens, easy to learn."""
    progressions(prefix, documents, seed, lengths=(2, 2 * mean), strides=(1, 5), vocabulary=VOCAB)


@pytest.fixture(scope="session")
def data_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small corpora, packed; sequences of 32 tokens."""
    directory = tmp_path_factory.mktemp("corpora")
    write_corpus(directory / "web", documents=300, seed=1)
    write_corpus(directory / "code", documents=150, seed=2)
    path = directory / "data.yaml"
    path.write_text(
        "seed: 7\nseq_length: 32\npacking: {mode: best_fit, open_bins: 4}\n"
        "sources:\n  web: {path: web, weight: 0.6}\n  code: {path: code, weight: 0.4}\n"
    )
    return path


@pytest.fixture(scope="module")
def order(whole: Path) -> list[int]:
    """The items that were trained by the run that nobody stops, the fixture ``whole`` of a file."""
    return items(trained(whole))


@pytest.fixture
def copy(killed: Path, tmp_path: Path) -> Path:
    """A copy of the run that was killed, the fixture ``killed`` of a file."""
    return copied(killed, tmp_path)


Launch = Callable[..., tuple[int, str]]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """``launch(program, *arguments, num_processes=2, launcher="env", env={}) -> (exit status, output)``."""

    def run(
        program: str,
        *arguments: object,
        num_processes: int = 2,
        launcher: Launcher = "env",
        env: dict[str, str] | None = None,
        timeout: float = 1200,
    ) -> tuple[int, str]:
        output = tmp_path_factory.mktemp("job") / "output.txt"
        cache = {"MEGARESUME_CACHE": str(tmp_path_factory.getbasetemp()), "DS_ACCELERATOR": "cpu"}
        with LocalJob(
            program,
            [str(a) for a in arguments],
            num_processes=num_processes,
            output=output,
            launcher=launcher,
            env=cache | (env or {}),
        ) as job:
            status = job.wait(timeout)
            return status, job.text()

    return run


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engines of two processes save; those of one process load from there."""
    return tmp_path_factory.mktemp("checkpoints")


def _results(launch: Launch, script: str, num_processes: int, *arguments: object) -> dict[str, Any]:
    status, output = launch(str(HERE / script), *arguments, num_processes=num_processes)
    found = {}
    for line in output.splitlines():
        if line.startswith("RESULT "):
            name, value = line.removeprefix("RESULT ").split(" ", 1)
            found[name] = json.loads(value)
    if status:
        found["failed"] = f"exit status {status}\n{output[-6000:]}"
    return found


class Results:
    """What the scenarios of one launch found; a launch that failed fails the tests of the scenarios it did not do."""

    def __init__(self, found: dict[str, Any]) -> None:
        self._found = found

    def __getitem__(self, scenario: str) -> Any:
        if scenario not in self._found:
            pytest.fail(f"no result of {scenario}: {self._found.get('failed', 'it did not run')}")
        return self._found[scenario]


@pytest.fixture(scope="session")
def two_ranks(launch: Launch, data_yaml: Path, checkpoints: Path) -> Results:
    """Results of scenarios_two_ranks.py."""
    return Results(_results(launch, "scenarios_two_ranks.py", 2, data_yaml, checkpoints))


@pytest.fixture(scope="session")
def one_rank(launch: Launch, data_yaml: Path, checkpoints: Path, two_ranks: Results) -> Results:
    """Results of scenarios_one_rank.py, which loads what two ranks have saved."""
    return Results(_results(launch, "scenarios_one_rank.py", 1, data_yaml, checkpoints))


@pytest.fixture(scope="session")
def stop_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs that are asked to stop save."""
    return tmp_path_factory.mktemp("stopped")


@pytest.fixture(scope="session")
def stopped(launch: Launch, data_yaml: Path, stop_root: Path) -> Results:
    """Results of stopping.py."""
    return Results(_results(launch, "stopping.py", 2, data_yaml, stop_root))


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk of 32 MB. Who may not mount has the faults in tests/reliability, which a shim makes."""
    directory = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(directory)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)
