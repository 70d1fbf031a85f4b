"""The flags of smoke: what cannot work is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaresume.command_line import normalise
from tests.cli.conftest import megaresume

BAD = {
    "--kill sigkill,unplug": ("no such way to stop a run", "unplug", "node-down"),
    "--nodes 2,x": ("not a list of numbers",),
    "--nodes 2,,1": ("not a list of numbers",),
    "--nodes=": ("not a list of numbers",),
    "--nodes 2,0": ("--nodes holds an impossible number",),
    "--nodes 3,2 --micro-batch-size 2 --global-batch-size 8": (
        "does not divide",
        "3 x 2 = 6 (3 x 1 ranks)",
        "a multiple of 12",
        "--global-batch-size 12",
    ),
    "--steps 6": ("too few steps for the stops", "2 stops", "12 or more"),
    "--save-interval 1": ("cannot cost one", "--save-interval 4"),
    "--data nowhere.yaml": ("no such data config",),
    "--script nowhere.sh": ("nowhere.sh cannot be read",),
    "--timeout 0": ("not a number above 0",),
    "--timeout soon": ("not a number from 0",),
    "--min-step-seconds -1": ("not a number from 0",),
    "--loss-tolerance nan": ("not a number from 0",),
    # What looks like a flag is a value here, its underscore is not ours, and its quote is not closed.
    "--launcher slurm --sbatch-options --qos='high_prio": ("cannot split --sbatch-options", "--qos='high_prio"),
    "--partition gpu": ("--partition is for Slurm",),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_flags(words: str, tmp_path: Path) -> None:
    done = megaresume("smoke", "--out", tmp_path / "out", *words.split())
    assert done.returncode == 2
    assert all(part in done.stderr for part in BAD[words]), done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


def test_options_of_sbatch_are_one_value() -> None:
    parsed = normalise(["smoke", "--sbatch_options", "--comment big_one", "--sbatch-options=--x_y", "--save_interval"])
    assert parsed == ["smoke", "--sbatch-options=--comment big_one", "--sbatch-options=--x_y", "--save-interval"]


def test_a_script_with_carriage_returns(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_bytes(b'#!/bin/bash\r\npython train.py "$@"\r\n')
    done = megaresume("smoke", "--out", tmp_path / "out", "--script", script)
    assert done.returncode == 2 and "CR LF" in done.stderr and f"sed -i 's/\\r$//' {script}" in done.stderr


@pytest.mark.parametrize("place", ["a-file", "a-file/out", "/proc/out"])
def test_a_place_that_cannot_be_one(place: str, tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    done = megaresume("smoke", "--out", tmp_path / place)
    assert done.returncode == 2 and "cannot make --out" in done.stderr and "--out ANOTHER" in done.stderr


def test_it_removes_nothing_that_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    done = megaresume("smoke", "--out", tmp_path, "--overwrite")
    assert done.returncode == 2 and "--out ANOTHER" in done.stderr
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_stops_come_behind_a_checkpoint_and_off_it() -> None:
    from megaresume.cluster.smoke.plan import SmokeOptions, make_plan

    plan = make_plan(
        SmokeOptions(out=Path("out"), kinds=("sigkill", "sigterm"), nodes=(2, 1, 3), workers=(0, 1, 0, 2, 1))
    )
    assert [stop.kind for stop in plan.stops] == ["sigkill", "sigterm", "sigkill", "sigterm"]
    assert [stop.step for stop in plan.stops] == [10, 18, 26, 34] and plan.steps == 40
    assert [layout.nodes for layout in plan.layouts] == [2, 1, 3, 2, 1]
    assert [layout.workers for layout in plan.layouts] == [0, 1, 0, 2, 1]
    assert plan.global_batch_size is not None
    for layout in plan.layouts:
        assert plan.global_batch_size % (layout.ranks * (layout.micro_batch_size or 0)) == 0


def test_other_ranks_than_saved_are_converted_for() -> None:
    from megaresume.cluster.smoke.plan import SmokeOptions, make_plan

    def flags(**options: object) -> tuple[str, ...]:
        plan = make_plan(SmokeOptions(out=Path("out"), **options))  # type: ignore[arg-type]
        return plan.launch("run", plan.layouts[0], data=None, model=()).flags

    assert "--megaresume-elastic" in flags(nodes=(2, 1))
    assert "--megaresume-elastic" not in flags(nodes=(2,))
    script = Path(__file__).parents[2] / "launch" / "torchrun.sh"
    assert "--megaresume-elastic" in flags(nodes=(2, 1), script=script, zero_stage=1)
    assert "--megaresume-elastic" not in flags(nodes=(2, 1), script=script)


@pytest.mark.parametrize("name", ["torchrun.sh", "deepspeed.sh", "slurm/train.sbatch"])
def test_our_scripts_pass_their_arguments_on(name: str) -> None:
    from megaresume.cluster.smoke.plan import SmokeOptions, make_plan
    from megaresume.shipped import launch_script

    plan = make_plan(SmokeOptions(out=Path("out"), script=launch_script(name)))
    assert not plan.own and plan.layouts[0].micro_batch_size is None
