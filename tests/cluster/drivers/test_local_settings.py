"""Settings of the scripts without a scheduler that are refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megaresume.cluster.drivers.decide import AttemptProgress
from megaresume.cluster.drivers.local import LocalDriver, LocalSettings
from megaresume.stream.errors import UsageError


def driver(directory: Path, launcher: str = "torchrun", flags: tuple[str, ...] = (), **changes: object) -> LocalDriver:
    (directory / "data.yaml").touch()
    words = {
        "run_dir": str(directory / "run"),
        "data": str(directory / "data.yaml"),
        "python": sys.executable,
        "procs_per_node": "1",
        "max_restarts": "0",
        "script": "torchrun.sh",
        "nnodes": "1",
        "node_rank": "",
        "master_addr": "",
        "master_port": "",
        "stop_status": "75",
    }
    return LocalDriver(launcher, LocalSettings(**{"train": ("-m", "x")} | words | changes, flags=flags))  # type: ignore[arg-type]


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
@pytest.mark.parametrize("train", [("gone.py", "--x"), ("-m", "megaresume.run", "gone.py")])
def test_a_script_that_is_not_there(tmp_path: Path, launcher: str, train: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="there is no script gone"):
        driver(tmp_path, launcher, train=train)._check()


RUN = ("-m", "megaresume.run", __file__)


def test_megatrons_own_datasets_need_no_data_config(tmp_path: Path) -> None:
    nowhere = {"data": "nowhere.yaml"}
    guard = driver(tmp_path, train=(*RUN, "--data-path", "corpus"), **nowhere)
    assert guard._check() == 1
    # refused there: nobody knows which samples they are
    assert "--megaresume-log-samples" not in guard.training
    for flags in (("--megaresume-data", "nowhere.yaml"), ("--megaresume_data=nowhere.yaml",)):
        with pytest.raises(UsageError, match=r"there is no DATA=nowhere\.yaml"):
            driver(tmp_path, train=RUN, flags=flags, **nowhere)._check()


@pytest.mark.parametrize(
    "train",
    [
        (*RUN, "--megaresume-data", "data.yaml"),
        (*RUN, "--megaresume_data=data.yaml"),
        (*RUN, "--megaresume-mode", "stream", "--data-path", "corpus"),
        ("-m", "megaresume.cluster.training"),
        ("my_training.py",),
    ],
)
def test_the_samples_of_a_stream_are_logged(tmp_path: Path, train: tuple[str, ...]) -> None:
    assert "--megaresume-log-samples" in driver(tmp_path, train=train).training


@pytest.mark.parametrize("changes", [{"max_restarts": "2"}, {"nnodes": "1:3"}])
def test_torchrun_would_begin_at_the_same_step_each_time(tmp_path: Path, changes: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="each restart in place would begin at --ckpt-step 20 again"):
        driver(tmp_path, flags=("--ckpt-step", "20"), **changes)._check()
    assert driver(tmp_path, **changes)._check() == 1
    assert driver(tmp_path, flags=("--ckpt-step", "20"))._check() == 1


def test_the_command_that_goes_on_begins_nowhere_in_particular(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = driver(tmp_path, flags=("--ckpt-step=20",))
    assert stopped._end(1, AttemptProgress(saved=31)) == 1
    assert "the same command without --ckpt-step=20 resumes from the last checkpoint" in capsys.readouterr().out
    assert stopped._end(1, AttemptProgress()) == 1  # nothing new to go on from
    assert "the same command resumes" in capsys.readouterr().out
