"""Energon's loader attached to DeepSpeed on two processes: killed, resumed, killed in a save, resumed again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megaresume
from megaresume.hosts import endless
from megaresume.hosts.deepspeed import item_data
from megaresume.program import main
from megaresume.stream.errors import UsageError

HERE = Path(__file__).parent
Launch = Callable[..., tuple[int, str]]


class Run:
    """The lives of two runs: one uninterrupted, one killed again and again."""

    def __init__(self, launch: Launch, shards: Path, root: Path) -> None:
        self.launch, self.shards, self.root = launch, shards, root

    def live(self, name: str, stop: int, *options: str) -> tuple[int, str]:
        return self.launch(str(HERE / "life.py"), self.shards, self.root, name, stop, *options)

    def trained(self, name: str, rank: int) -> list[Any]:
        """[step, what the batch held], in the order in which it was trained."""
        return [json.loads(line) for line in (self.root / f"{name}.{rank}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(launch: Launch, energon_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(launch, energon_dataset, tmp_path_factory.mktemp("loaders"))


@pytest.fixture(scope="module")
def whole(run: Run) -> list[list[Any]]:
    status, output = run.live("whole", 9)
    assert status == 0, output[-3000:]
    return [run.trained("whole", rank) for rank in (0, 1)]


@pytest.fixture(scope="module")
def first_life(run: Run) -> None:
    """Dies after step 4, saved at 3 with a batch read ahead."""
    status, output = run.live("killed", 4, "save=3", "ahead=1", "kill=step")
    latest = run.root / "killed" / "latest"
    assert status != 0 and latest.exists() and latest.read_text() == "global_step3", output[-3000:]


@pytest.fixture(scope="module")
def second_life(run: Run, first_life: None) -> None:
    """Resumes at 3, saves at 4 after fewer batches than workers, and dies in its save at 6."""
    status, output = run.live("killed", 6, "load=1", "save=4,6", "kill=save")
    assert status != 0, output[-3000:]


def test_the_whole_run_reads_each_record_once(whole: list[list[Any]]) -> None:
    keys = [key for rank in whole for _, held in rank for key, _ in held]
    assert len(keys) == len(set(keys)) == 2 * 9 * 2


def test_a_kill_between_the_states_and_the_commit_leaves_the_checkpoint_before(run: Run, second_life: None) -> None:
    save = run.root / "killed"
    assert (save / "latest").read_text() == "global_step4"
    states = [path.relative_to(save).as_posix() for path in sorted(save.glob("megaresume/step_*.loader/*"))]
    steps = ["step_0000003.loader", "step_0000004.loader", "step_0000006.loader"]
    assert states == [f"megaresume/{step}/rank_0000{rank}.pkl" for step in steps for rank in (0, 1)]
    assert not (save / "megaresume" / "step_0000006.manifest.json").exists()


def test_inspect_shows_the_loader_and_unpickles_nothing(
    run: Run, second_life: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(run.root / "killed"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    loader = report["state"]["state"]["content"]
    assert (loader["kind"], loader["dp"], loader["workers"], loader["batch_size"]) == ("energon", 2, 2, 2)
    assert (report["choice"]["tag"], report["choice"]["samples"], loader["batches"]) == ("global_step4", 16, 4)
    assert main(["inspect", str(run.root / "killed")]) == 0
    assert "megatron-energon" in capsys.readouterr().out


def test_every_life_trains_what_the_uninterrupted_run_trained(
    run: Run, whole: list[list[Any]], second_life: None
) -> None:
    status, output = run.live("killed", 9, "load=1")
    assert status == 0, output[-3000:]
    assert "resumed at sample 16" in output and "repeated 0 skipped 0" in output
    for rank in (0, 1):
        trained = run.trained("killed", rank)
        # Steps 4 to 6 were trained by two lives, 5 and 6 because their checkpoint never became one.
        assert [step for step, _ in trained] == [1, 2, 3, 4, 4, 5, 6, 5, 6, 7, 8, 9]
        expected = dict(whole[rank])
        assert trained == [[step, expected[step]] for step, _ in trained]


def test_refusals(run: Run, launch: Launch, energon_dataset: Path, second_life: None) -> None:
    _, output = launch(str(HERE / "refusals.py"), energon_dataset, run.root, num_processes=1)
    line = next((line for line in output.splitlines() if line.startswith("RESULT refusals ")), None)
    assert line is not None, output[-3000:]
    assert "RESULT forwards [0]" in output  # of steps that are over
    found = json.loads(line.removeprefix("RESULT refusals "))[0]
    assert {name: error[:2] for name, error in found.items()} == {
        "dp": [
            "StateError",
            "the data-parallel size changed, and the states of this loader belong to the ranks and workers that saved "
            "them",
        ],
        "workers": [
            "StateError",
            "the number of worker processes changed, and the states of this loader belong to the ranks and workers "
            "that saved them",
        ],
        "batch_size": ["StateError", "the batch size of the loader changed, and its state counts in batches"],
        "kind": ["StateError", "the checkpoint was trained with another kind of loader"],
        "rank": ["UsageError", "the loader and the engine are on different data-parallel ranks"],
        "curriculum": ["UsageError", "DeepSpeed's curriculum cannot be used with megaresume.attach"],
        "random_ltd_begins": ["no error", ""],
        "random_ltd_resumes": ["no error", ""],
        "random_ltd": ["UsageError", "DeepSpeed cannot load into layers that are wrapped for random-LTD"],
        "sizes": ["UsageError", "the loader and the engine have different batch sizes"],
        "damaged": ["CheckpointError", f"none of the 3 checkpoints in {run.root / 'damaged'} is complete"],
        "missing": ["CheckpointError", f"none of the 3 checkpoints in {run.root / 'missing'} is complete"],
        "attached_late": [
            "StateError",
            "the engine is past its first step, but no state of the loader was restored",
        ],
        "no_state": ["UsageError", "this loader has no state that could be saved"],
        "no_loader": ["UsageError", "this rank has no loader"],
        "option": ["UsageError", "this option is for megaresume's streams"],
    }
    assert found["dp"][2].startswith("start with 2 data-parallel ranks and 2 workers; or a stream")
    assert found["workers"][2].startswith("num_workers=2; or a stream of megaresume's")
    assert found["rank"][2] == "leave dp_rank and dp_size out"
    assert found["sizes"][2] == "DataLoader(batch_size=2, accumulation=2)"
    assert "rank_00000.pkl" in found["damaged"][3] and "rank_00001.pkl" in found["missing"][3]


def test_a_pipeline_is_told_the_ranks_that_its_loader_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages train the same samples, and torch.distributed says two ranks."""
    loader = megaresume.DataLoader(torch.arange(8), batch_size=2, dp_rank=1, dp_size=2)
    engine = SimpleNamespace(data_parallel_group=None)
    monkeypatch.setattr(item_data.facts, "data_rank", lambda _: 0)
    monkeypatch.setattr(item_data.facts, "data_size", lambda _: 1)
    monkeypatch.setattr(endless, "world_size", lambda: 2)
    with pytest.raises(UsageError) as caught:
        item_data.check_loader(engine, loader)
    assert caught.value.action == (
        "DataLoader(dp_rank=torch.distributed.get_rank(engine.data_parallel_group), "
        "dp_size=torch.distributed.get_world_size(engine.data_parallel_group))"
    )
