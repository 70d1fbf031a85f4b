"""Random state in the checkpoints of real engines: dropout.py trains, is killed, and resumes; these look."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megaresume.cluster.processes import LocalJob
from megaresume.program import main

HERE = Path(__file__).parent
CASES = ("zero0", "zero1", "zero2", "zero3", "fp16", "seeded", "pipeline")


def results(text: str) -> dict[str, list[Any]]:
    lines = [line.split(" ", 2)[1:] for line in text.splitlines() if line.startswith("RESULT ")]
    return {case: json.loads(value) for case, value in lines}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, data_yaml: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Where they wrote, and what the whole and the resumed engines found."""
    root = tmp_path_factory.mktemp("dropout")
    env = {"MEGARESUME_CACHE": str(root), "DS_ACCELERATOR": "cpu"}

    def job(phase: str) -> LocalJob:
        arguments = [str(data_yaml), str(root), phase]
        return LocalJob(
            str(HERE / "dropout.py"), arguments, num_processes=2, output=root / f"{phase}.txt", launcher="env", env=env
        )

    with job("whole") as whole:
        assert whole.wait_until(lambda: "KILL ME" in whole.text()), whole.text()[-6000:]
        assert whole.kill() == 2
    with job("resumed") as resumed:
        assert resumed.wait(300) == 0, resumed.text()[-6000:]
    return root, results(whole.text()), results(resumed.text())


def losses(path: Path, first: int = 1) -> list[str]:
    return [line for line in path.read_text().splitlines() if int(line.split()[0]) >= first]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rank", [0, 1])
def test_losses_with_dropout_go_on_to_the_last_bit(runs: Any, case: str, rank: int) -> None:
    root, _, _ = runs
    whole = losses(root / "whole" / case / f"{rank}.txt")
    assert len({line.split()[1] for line in whole}) > 10  # there was something to compare
    cut = losses(root / "cut" / case / f"{rank}.txt")
    assert cut[: len(whole)] == whole[: len(cut)]  # the same up to where it was killed
    assert losses(root / "resumed" / case / f"{rank}.txt") == losses(root / "whole" / case / f"{rank}.txt", first=5)


def test_a_rank_whose_state_is_lost_is_named_and_the_checkpoint_before_is_taken(
    runs: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _, resumed = runs
    for found in resumed["damage"]:
        assert found["asked"][0] == "CheckpointError" and "the random state of rank 1 is missing" in found["asked"][3]
        assert found["path"] == "global_step2"
        assert found["unsaved"][0] == "CheckpointError"
        assert "the checkpoint global_step3 is incomplete and was not committed" in found["unsaved"][1]
        assert "step_0000003.random/rank_00001.json is missing" in found["unsaved"][3]
    save = root / "cut" / "zero1" / "save"
    assert main(["inspect", str(save), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(c["tag"], c["status"]) for c in report["checkpoints"]] == [
        ("global_step4", "damaged"),
        ("global_step2", "complete"),
    ]
    assert "the random state of rank 1 is missing" in report["checkpoints"][0]["reasons"][0]
    assert report["checkpoints"][1]["random"]["ranks"] == 2 and len(report["checkpoints"][1]["random"]["digest"]) == 16
    assert main(["inspect", str(save)]) == 0
    assert "random state  of 2 ranks, digest" in capsys.readouterr().out
    assert main(["verify", str(save)]) == 1
    assert "LOST       global_step4: the random state of rank 1 is missing" in capsys.readouterr().out
    whole = root / "whole" / "zero1" / "save"
    assert main(["verify", str(whole)]) == 0 and main(["inspect", str(root / "unsaved")]) == 0


@pytest.mark.parametrize("case", CASES)
def test_schedule_and_scaler_go_on(runs: Any, case: str) -> None:
    _, whole, resumed = runs
    for before, after in zip(whole[case], resumed[case], strict=True):
        assert " | random state restored | " in after["line"]
        assert {name: after[name] for name in before} == before
    if case == "fp16":
        assert before["skipped"] > 0 and before["scale"] < 2**24
