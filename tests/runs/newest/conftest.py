"""Checkpoint directories of every layout, written once by their own libraries on 2 ranks, copied for each test."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megaresume.cluster.processes import LocalJob

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

Copy = Callable[[str], Path]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    program = Path(__file__).with_name("writers.py")
    output = root / "output.txt"
    env = {"DS_ACCELERATOR": "cpu"}
    with LocalJob(str(program), [str(root)], num_processes=2, output=output, launcher="env", env=env) as job:
        assert job.wait(1200) == 0, job.text()[-4000:]
    return root


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Copy:
    """``copy(name)``: a directory of checkpoints of its own."""

    def make(name: str) -> Path:
        shutil.copytree(written / name, tmp_path / name)
        return tmp_path / name

    return make
