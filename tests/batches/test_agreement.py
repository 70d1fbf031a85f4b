"""Ranks that iterate over a `DataLoader` of other data, or at another position, are refused: two run `agreeing.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaresume.cluster.processes import LocalJob
from tests.hosts.torch.record import ENVIRONMENT

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By case: of each rank, the items that it was given, or the error."""
    file = tmp_path_factory.mktemp("agreeing") / "said.json"
    program = str(Path(__file__).with_name("agreeing.py"))
    words = [str(file)]
    with LocalJob(
        program, words, num_processes=2, output=file.with_name("out"), launcher="env", env=ENVIRONMENT
    ) as job:
        assert job.wait() == 0, job.text()
    found: dict[str, list[Any]] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("case", ["alike", "resumed alike"])
def test_ranks_that_are_alike_train_each_item_once_in_an_epoch(said: dict[str, list[Any]], case: str) -> None:
    one, other = said[case]
    assert len(one) == len(other) == 20
    assert sorted(one + other) == sorted([*range(20)] * 2)


def test_a_copy_is_another_loader(said: dict[str, list[Any]]) -> None:
    one, other = said["copies"]
    assert sorted(one + other) == sorted([*range(20)] * 4)


def test_ranks_that_were_given_are_not_compared(said: dict[str, list[Any]]) -> None:
    assert [sorted(items) for items in said["their own ranks"]] == [
        sorted([*range(first, first + 20)] * 2) for first in (0, 100)
    ]


def test_ranks_may_begin_again_with_a_state_at_their_own_pace(said: dict[str, list[Any]]) -> None:
    one, other = said["measured"]
    assert sorted(one + other) == sorted([*range(20)] * 3)


def test_a_rank_may_iterate_alone(said: dict[str, list[Any]]) -> None:
    assert said["alone"][0] == [] and len(said["alone"][1]) == 20


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("parts", ["these hold other items"]),
        ("lengths", ["items: data 20", "items: data 21"]),
        ("seeds", ["seed 0", "seed 1"]),
        ("batch sizes", ["batch_size=2", "batch_size=3"]),
        ("skips", []),
        ("one has loaded", ["samples 0 to", "samples 12 to"]),
        ("other states", ["samples 8 to", "samples 12 to"]),
        ("one has looked", ["rank 0 left a for at sample 4", "rank 1 is at sample 8"]),
    ],
)
def test_the_rank_that_comes_later_is_refused(said: dict[str, list[Any]], case: str, words: list[str]) -> None:
    errors = [one for one in said[case] if isinstance(one, str)]
    assert len(errors) == 1, said[case]
    assert all(one in errors[0] for one in ["the ranks disagree on the data", *words]), errors[0]
