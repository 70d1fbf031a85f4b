"""A pipeline of DeepSpeed on another number of stages, and another kind of ZeRO."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def stages(launch: Any, data_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two stages found on two ranks, then one stage on one rank, by case."""
    root, found = tmp_path_factory.mktemp("stages"), []
    for number, mode in ((2, "first"), (1, "second")):
        toy = (str(HERE / "stages_toy.py"), data_yaml, root, number, mode)
        status, output = launch(*toy, num_processes=number)
        assert status == 0, output[-3000:]
        lines = [line.removeprefix("RESULT ") for line in output.splitlines() if line.startswith("RESULT ")]
        found.append({name: json.loads(value)[0] for name, value in (line.split(" ", 1) for line in lines)})
    return found


def test_zero_is_converted_and_the_losses_are_the_same(stages: list[dict[str, Any]]) -> None:
    before, after = stages[0]["zero1"], stages[1]["zero1"]
    kind, headline, action, found = after["from 1"]
    assert kind == "CheckpointError" and "ranks or stages" in headline and "megaresume convert" in action
    assert "on 1 data-parallel rank and 2 pipeline stages; 1 and 1 now" in found
    assert "step 2 from global_step2_universal" in after["line"]
    assert after["losses"] == before["losses"][2:]


def test_without_zero_the_optimizer_needs_as_many_stages(stages: list[dict[str, Any]]) -> None:
    kind, headline, action, _ = stages[1]["zero0"]["from 0"]
    assert kind == "CheckpointError" and "without ZeRO" in headline and "start on 2 pipeline stages" in action
    # The weights alone: the first loss is the same, and then the moments of Adam are missing.
    assert stages[1]["zero0"]["losses"][0] == stages[0]["zero0"]["losses"][2]
    assert stages[1]["zero0"]["losses"][1] != stages[0]["zero0"]["losses"][3]


@pytest.mark.parametrize(("now", "before"), [(0, 1), (1, 0)])
def test_another_kind_of_zero_is_refused(stages: list[dict[str, Any]], now: int, before: int) -> None:
    kind, headline, action, _ = stages[1][f"zero{now}"][f"from {before}"]
    assert kind == "CheckpointError" and "another kind of ZeRO" in headline and f"start with ZeRO {before}" in action
