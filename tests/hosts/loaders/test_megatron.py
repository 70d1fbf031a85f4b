"""A loader of the script's own under the stand-in of Megatron's training package, on two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.megatron.conftest import mini as mini  # a fixture

SCRIPT = str(Path(__file__).with_name("pretrain_loader.py"))
WORDS = ["--seq-length", 8, "--vocab-size", 65, "--micro-batch-size", 2, "--global-batch-size", 8, "--eval-iters", 0]
WORDS += ["--dataloader-type", "external", "--train-iters", 12]


@pytest.fixture(scope="module", autouse=True)
def _core() -> None:
    pytest.importorskip("megatron.core")


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


def words(save: Path) -> list[object]:
    return [*WORDS, "--num-workers", 1, "--save", save, "--load", save, "--save-interval", 3]


@pytest.fixture(scope="module")
def whole(mini: Any) -> dict[int, list[str]]:
    """60 numbers, 8 a step: 12 steps are more than one pass."""
    run = mini(*WORDS, "--num-workers", 1, script=SCRIPT, hooks=False)
    assert run.status == 0 and len(run.steps()) == 12, run.output
    steps: dict[int, list[str]] = run.steps()
    return steps


@pytest.fixture(scope="module")
def killed(mini: Any, save: Path, whole: dict[int, list[str]]) -> Any:
    run = mini(*words(save), script=SCRIPT, hooks=False, env={"MINI_KILL": "step:5"})
    assert run.status == -9 and run.steps() == {step: whole[step] for step in run.steps()}, run.output
    return run


def test_killed_and_resumed(mini: Any, save: Path, whole: dict[int, list[str]], killed: Any) -> None:
    again = mini(*words(save), script=SCRIPT, hooks=False)
    assert again.status == 0 and "resumed at sample 24" in again.output, again.output
    assert again.steps() == {step: whole[step] for step in range(4, 13)}
    states = sorted(path.relative_to(save).as_posix() for path in save.glob("megaresume/*.loader/*"))
    assert states[:2] == [f"megaresume/step_0000003.loader/rank_0000{rank}.pkl" for rank in (0, 1)]


def test_fewer_ranks_are_refused(mini: Any, save: Path, killed: Any) -> None:
    fewer = mini(*words(save), script=SCRIPT, hooks=False, num_processes=1)
    assert fewer.status == 1 and "the data-parallel size changed" in fewer.output, fewer.output
    assert "Traceback" not in fewer.output


@pytest.fixture(scope="module")
def of_items(mini: Any) -> dict[int, list[str]]:
    run = mini(*WORDS, script=SCRIPT, hooks=False, env={"OURS": "{}"})
    assert run.status == 0 and len(run.steps()) == 12, run.output
    steps: dict[int, list[str]] = run.steps()
    assert len(set([sample for step in steps.values() for sample in step][:60])) == 60
    return steps


def test_a_loader_of_ours_on_tensor_ranks_and_then_on_others(
    mini: Any, tmp_path: Path, of_items: dict[int, list[str]]
) -> None:
    """One of the two tensor-parallel ranks has no loader: it is told the state, which it saves with its part."""
    ours = {"script": SCRIPT, "hooks": False}
    where = ["--save", tmp_path, "--load", tmp_path, "--save-interval", 3]
    killed = mini(*WORDS, *where, "--tensor-model-parallel-size", 2, **ours, env={"OURS": "{}", "MINI_KILL": "step:5"})
    assert killed.status == -9 and killed.steps() == {step: of_items[step] for step in killed.steps()}, killed.output
    again = mini(*WORDS, *where, "--num-workers", 1, "--micro-batch-size", 4, **ours, env={"OURS": "{}"})
    assert again.status == 0 and "resumed at sample 24" in again.output, again.output
    assert again.steps() == {step: of_items[step] for step in range(4, 13)}
    assert not list(tmp_path.glob("megaresume/*.loader"))


@pytest.mark.parametrize(
    ("options", "flags", "said"),
    [
        ({"accumulation": 1}, [], "different batch sizes"),
        ({"max_epochs": 2}, [], "a loader that ends"),
        ({"dp_rank": 0, "dp_size": 1}, [], "on different data-parallel ranks"),
        ({}, ["--rampup-batch-size", 4, 4, 16], "global batch size is to change"),
    ],
)
def test_other_loaders_of_ours_are_refused(mini: Any, options: dict[str, Any], flags: list[object], said: str) -> None:
    run = mini(*WORDS, *flags, script=SCRIPT, hooks=False, env={"OURS": json.dumps(options)})
    assert run.status == 1 and said in run.output and "Traceback" not in run.output, run.output
