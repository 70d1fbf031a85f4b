"""`megaresume.attach` in torchtitan's own Trainer on gloo: killed, and resumed on other ranks and data.

What the Trainer trained it writes down itself: `program.py`.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.load.choose import choose
from megaresume.program import main
from tests.hosts.torch.record import ended, items, launch, lines, refused, trained
from tests.release import release

PROGRAM = Path(__file__).with_name("program.py")
DOCUMENT = Path(__file__).parents[3] / "docs" / "torchtitan.md"


run = functools.partial(ended, PROGRAM)
refusal = functools.partial(refused, PROGRAM)


@pytest.fixture(scope="module")
def whole(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nearly three epochs with two ranks, which nobody stops."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    run(python, directory, 2)
    return directory


@pytest.fixture(scope="module")
def killed(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, killed in the second epoch: in the middle of the save of step 24."""
    directory = tmp_path_factory.mktemp("killed") / "run"
    done = launch(PROGRAM, directory, 2, python=python, kill=24)
    assert done.returncode != 0 and "SIGKILL" in done.stderr, done.stderr[-6000:]
    assert (directory / "step-24").is_dir()
    return directory


@release(
    "torchtitan, which no extra installs; four launches of it",
    "`tests/hosts/torchtitan/test_parts.py::test_epoch_after_epoch_to_the_end_of_the_data`, "
    "`tests/hosts/torch/test_loop.py::test_two_ranks_to_one_and_another_writer`: the same feed, steps and session",
)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {"batch": 8, "num_workers": 2}), (2, {"batch": 1, "config": {"checkpoint.async_mode": "async"}})],
    ids=["one_batch_and_workers", "asynchronous"],
)
def test_killed_in_a_save_and_resumed(python: str, copy: Path, order: list[int], ranks: int, options: Any) -> None:
    said = run(python, copy, ranks, attempt=2, **options)
    assert "passed over step-24" in said
    assert items(trained(copy)) == order
    assert main(["verify", str(copy)]) == 0


@release(
    "torchtitan: three launches",
    "`tests/hosts/torchtitan/test_parts.py::test_epoch_after_epoch_to_the_end_of_the_data`",
)
def test_the_end_of_the_data_and_of_the_run(python: str, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    assert "the last step of the data may be short" in refusal(python, directory, max_epochs=1)
    options = {"max_epochs": 1, "drop_last": True, "steps": 50}
    run(python, directory, 1, **options)
    assert len(set(items(trained(directory)))) == 96
    choice = choose(directory)
    assert choice is not None and choice.tag == "step-12"
    assert "resumed at sample 96" in run(python, directory, 1, attempt=2, **options)
    assert len(lines(directory)) == 12 * 4


@release(
    "torchtitan: three launches",
    "`tests/hosts/torch/test_loop.py::test_the_losses_are_those_of_a_run_that_nobody_stopped`",
)
def test_what_is_kept_and_the_last_step(python: str, tmp_path: Path, order: list[int]) -> None:
    directory = tmp_path / "run"
    keep = {"checkpoint.keep_latest_k": 2, "checkpoint.interval": 2, "checkpoint.async_mode": "async"}
    run(python, directory, 1, steps=10, config=keep | {"checkpoint.last_save_model_only": True})
    assert sorted(path.name for path in directory.glob("step-*")) == ["step-10", "step-6", "step-8"]
    said = run(python, directory, 1, attempt=2, steps=12, config=keep)
    assert "step 8 from step-8" in said  # step-10 is a model alone
    assert items(trained(directory)) == order[:96]
    assert sorted(path.name for path in directory.glob("step-*")) == ["step-10", "step-12"]
    said = run(python, directory, 1, attempt=3, steps=14, config=keep | {"checkpoint.load_step": 10})
    assert "step 10 from step-10" in said
    assert items(trained(directory)) == order[:112]


@release(
    "torchtitan: seven launches",
    "`tests/hosts/torchtitan/test_parts.py::test_settings_that_are_refused`, "
    "`tests/hosts/torchtitan/test_parts.py::test_loaders_that_are_refused`",
)
def test_what_is_refused(python: str, tmp_path: Path, killed: Path) -> None:
    directory = tmp_path / "run"
    assert "accumulation=4" in refusal(python, directory, accumulation=2)
    assert "dp_size" in refusal(python, directory, 2, dp_size=1, dp_rank=0)
    assert "checkpoint.enable" in refusal(python, directory, config={"checkpoint.enable": False})
    excluded = {"checkpoint.exclude_from_loading": ["dataloader"]}
    assert "exclude_from_loading: dataloader" in refusal(python, directory, config=excluded)
    # Written without megaresume.
    run(python, directory, 1, steps=2, attached=False, config={"checkpoint.interval": 2})
    said = refusal(python, directory)
    assert "the checkpoint has no data state" in said and "initial_load_path" in said
    # Its weights, into another folder.
    weights = {"checkpoint.initial_load_path": str(directory / "step-2")}
    run(python, tmp_path / "next", 1, steps=2, config=weights)
    assert "resumed" not in (tmp_path / "next.record.0").read_text()


@release(
    "torchtitan: two launches",
    "`tests/hosts/torchtitan/test_parts.py::test_the_data_in_a_checkpoint`",
)
def test_the_program_of_the_document(python: str, tmp_path: Path) -> None:
    program, *_ = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (settings,) = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    settings = settings.replace("seq_len = 128", "seq_len = 16").replace("steps = 100", "steps = 4")
    (tmp_path / "run.toml").write_text(settings.replace("interval = 10", "interval = 2"))
    words = [python, "-m", "torch.distributed.run", "--nproc-per-node=2", str(PROGRAM.with_name("cpu.py")), "train.py"]
    words += ["--job.config_file", "run.toml"]
    for steps in (4, 6):
        done = subprocess.run([*words, f"--training.steps={steps}"], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-6000:]
    assert "resumed at sample 64" in done.stdout
    choice = choose(tmp_path / "outputs" / "checkpoint")
    assert choice is not None and choice.tag == "step-6"
    assert json.loads(json.dumps(choice.to_dict()))["samples"] == 96
