"""Sentence Transformers' trainer, in a program that knows nothing of megaresume, under the launcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.hugging_face.frameworks.programs import HERE, ITEMS, Program, tiny
from tests.hosts.torch.record import items, lines, trained
from tests.release import release

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def program(environment: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Program:
    bin = environment("sentence_transformers")
    return Program(bin=bin, directory=tiny(tmp_path_factory.mktemp("sentence_transformers"), bin))


def train(program: Program, run: str, *, size: int = 4, attempt: int = 1, kill: str = "", **options: Any) -> Any:
    """The program: exit status and output."""
    words = str(HERE / "embed.py"), str(program.directory / run), str(size), json.dumps(options)
    return program.start(*words, run=run, attempt=attempt, kill=kill)


@release(
    "Sentence Transformers, which no extra installs; three launches of it",
    "`tests/hosts/hugging_face/test_launch.py::test_killed_in_a_save_and_resumed`, "
    "`tests/hosts/hugging_face/test_families.py::test_sentence_transformers`",
)
def test_killed_in_a_save_and_resumed(program: Program) -> None:
    status, text = train(program, "whole")
    assert status == 0, text[-3000:]
    order = items(trained(program.directory / "whole"))
    assert all(sorted(order[ITEMS * e : ITEMS * (e + 1)]) == list(range(ITEMS)) for e in range(2))
    status, text = train(program, "run", kill="save 10")
    assert status != 0 and (program.directory / "run" / "checkpoint-10").is_dir(), text[-3000:]
    status, text = train(program, "run", size=3, attempt=2)
    assert status == 0 and "step 5 from checkpoint-5" in text and "repeated 0 skipped 0" in text, text[-3000:]
    assert items(trained(program.directory / "run")) == order


@release(
    "Sentence Transformers: a launch",
    "`tests/hosts/hugging_face/test_families.py::test_sentence_transformers`",
)
def test_refused(program: Program) -> None:
    status, text = train(program, "refused", batch_sampler="no_duplicates")
    assert status != 0 and "batch_sampler cannot be used" in text, text[-3000:]
    assert "megaresume: error: " in text and not lines(program.directory / "refused")
