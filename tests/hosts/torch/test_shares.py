"""Loaders that are not those of all ranks are refused by `megaresume.attach`: two processes, `shares.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megaresume.cluster.processes import LocalJob
from tests.hosts.conftest import write_corpus
from tests.hosts.torch.record import ENVIRONMENT

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By case: of each rank, what it was given for the first step, or the error."""
    root = tmp_path_factory.mktemp("shares")
    write_corpus(root / "web", documents=60, seed=1)
    (root / "data.yaml").write_text("seed: 7\nseq_length: 32\nsources:\n  web: {path: web}\n")
    program, words = str(Path(__file__).with_name("shares.py")), [str(root), str(root / "data.yaml")]
    with LocalJob(program, words, num_processes=2, output=root / "out", launcher="env", env=ENVIRONMENT) as job:
        assert job.wait() == 0, job.text()
        found: dict[str, list[Any]] = json.loads((root / "said.json").read_text())
        return found | {"printed": job.text().splitlines()}


def test_right_ones_are_taken(said: dict[str, list[Any]]) -> None:
    assert said["text"] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert len({*said["items"][0], *said["items"][1]}) == 4
    assert said["tensor parallel"] == said["context parallel"] == [list(range(8))] * 2
    assert said["layers"] == said["layers and fsdp2"] == said["stages"] == said["tensor parallel"]
    assert said["fsdp2 and layers"] == said["within fsdp2"] == said["items"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("numbers on a node", "do not cover all data-parallel ranks(.|\n)*process 0: 0 of 2, process 1: 0 of 2"),
        ("numbers on a node, items", "process 0: 1 of 2, process 1: 1 of 2"),
        ("another size", "process 0: 0 of 2, process 1: 1 of 3"),
        ("one process, ddp", "DDP or FSDP over 2 processes, and a loader with dp_size=1(.|\n)*dp_size=2"),
        ("one process, fsdp2", "DDP or FSDP over 2 processes, and a loader with dp_size=1(.|\n)*dp_size=2"),
        ("fsdp1", r"FSDP1 cannot be used in your own loop(.|\n)*fully_shard\(model\)"),
        ("batch size", "disagree on the batches(.|\n)*batch_size=2,(.|\n)*batch_size=3,"),
        ("accumulation", "disagree on the batches(.|\n)*accumulation=1,(.|\n)*accumulation=2,"),
        ("schedule", "disagree on the batches(.|\n)*8(.|\n)*12"),
        ("skips", "disagree on the data"),
        ("layers, left out", "of one tensor-parallel group would(.|\n)*process 0: dp_rank=0, process 1: dp_rank=1"),
        ("layers and fsdp2, left out", "of one tensor-parallel group would train different samples"),
        ("stages, left out", "of one pipeline group would(.|\n)*process 0: dp_rank=0, process 1: dp_rank=1"),
        ("layers apart", "only the parameters of rank 0(.|\n)*layer 0.bias, layer 0.weight(.|\n)*writer='dcp'"),
        ("writer", "disagree on what is saved(.|\n)*rank 0: dcp: model; rank 1: torch: model"),
    ],
)
def test_wrong_ones_are_refused(said: dict[str, list[Any]], case: str, words: str) -> None:
    for error in said[case]:
        assert isinstance(error, str) and re.search(words, error), error


def test_states_that_differ_between_ranks_are_named_once(said: dict[str, list[Any]]) -> None:
    """A checkpoint holds that of one rank. Tensors that only one has ("in turns") are saved, but not into one file."""
    lines = [line for line in said["printed"] if "WARNING: the state of" in line]
    names = ["another", "stage", "parts"]
    assert [line.split("'")[1] for line in lines] == [*names, *names, "in turns"]
    assert all("is another one on rank 1, and checkpoints hold one for all ranks" in line for line in lines)
