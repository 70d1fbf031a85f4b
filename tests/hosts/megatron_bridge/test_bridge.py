"""`megaresume.attach` in Megatron-Bridge's own ``pretrain`` on gloo: killed, and resumed on other ranks.

What the run trained it writes down itself: `program.py`.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest

from megaresume.program import main
from tests.hosts.torch.record import copied, ended, items, launch, lines, refused, trained
from tests.release import release

PROGRAM = Path(__file__).with_name("program.py")


run = functools.partial(ended, PROGRAM)
refusal = functools.partial(refused, PROGRAM)


@pytest.fixture(scope="module")
def whole(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nearly three epochs on two ranks, which nobody stops."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    run(python, directory, 2)
    return directory


@pytest.fixture(scope="module")
def killed(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, killed in the second epoch: in the middle of the save of step 24."""
    directory = tmp_path_factory.mktemp("killed") / "run"
    done = launch(PROGRAM, directory, 2, python=python, kill=24)
    assert done.returncode != 0 and "SIGKILL" in done.stderr, done.stderr[-6000:]
    assert (directory / "iter_0000024" / "train_state.pt").exists()
    return directory


@release(
    "Megatron-Bridge: three launches",
    "`tests/hosts/megatron_bridge/test_parts.py`, and "
    "`tests/hosts/contract/test_loop.py`: the same feed, steps and session",
)
def test_killed_in_a_save_and_resumed(python: str, copy: Path, order: list[int]) -> None:
    said = run(python, copy, 2, attempt=2, iters=37, checkpoint={"most_recent_k": 1}, evals=2, workers=2)
    assert "passed over iter_0000024" in said
    assert items(trained(copy)) == order
    assert main(["verify", str(copy)]) == 0
    assert [path.name for path in copy.glob("iter_*")] == ["iter_0000037"]
    evaluated = [json.loads(line) for line in copy.with_name("run.evaluated.0").read_text().splitlines()]
    each = [[0, 2], [4, 6], [8, 10], [12, 14]]
    assert [(line["step"], line["items"]) for line in evaluated] == [(at, row) for at in (24, 32, 37) for row in each]


@release(
    "Megatron-Bridge, which no extra installs: two launches",
    "`tests/hosts/megatron_bridge/test_parts.py::test_every_batch_is_read_for_the_step_that_is_counted`",
)
def test_a_finished_run_again_and_longer(python: str, whole: Path, tmp_path: Path, order: list[int]) -> None:
    directory = copied(whole, tmp_path)
    run(python, directory, 1, attempt=2, batch=4)
    assert items(trained(directory)) == order
    said = run(python, directory, 1, attempt=3, batch=4, iters=40, checkpoint={"ckpt_step": 32})
    assert "repeated 0 skipped 0 | step 32 from iter_0000032" in said
    handed = items(trained(directory))
    assert handed[:296] == order and len(handed) == 320 and len(set(handed[200:300])) == 100


@release(
    "Megatron-Bridge: three launches",
    "`tests/hosts/megatron_bridge/test_parts.py::test_a_stage_in_the_middle_of_a_pipeline_reads_nothing`",
)
def test_a_stream_with_tensor_and_pipeline_parallelism(python: str, data_yaml: Path, tmp_path: Path) -> None:
    stream = tmp_path / "data.yaml"
    text = data_yaml.read_text().replace("seq_length: 32", "seq_length: 16")
    stream.write_text(text.replace("path: ", f"path: {data_yaml.parent}/"))
    expected = tmp_path / "whole" / "run"
    expected.parent.mkdir()
    run(python, expected, 1, stream=str(stream), iters=8, batch=4, interval=4)
    order = [row for step in trained(expected) for row in step]
    directory = tmp_path / "parallel" / "run"
    directory.parent.mkdir()
    run(python, directory, 2, stream=str(stream), iters=8, batch=4, interval=4, tp=2, train={"exit_interval": 5})
    run(python, directory, 2, stream=str(stream), iters=8, batch=4, interval=4, pp=2, attempt=2)
    for rank in range(2):  # both read the whole stream
        rows = [line for line in lines(directory) if line["rank"] == rank]
        assert [line["step"] for line in rows if line["attempt"] == 2] == [6, 6, 7, 7, 8, 8]
        assert [row for line in rows for row in line["items"]] == order
    assert main(["verify", str(directory)]) == 0


@release(
    "Megatron-Bridge: three launches",
    "`tests/hosts/megatron_bridge/test_parts.py::test_every_batch_is_read_for_the_step_that_is_counted`",
)
def test_finetune_killed_in_its_first_save_and_in_another(
    python: str, whole: Path, tmp_path: Path, order: list[int]
) -> None:
    directory = tmp_path / "run"
    options = {"pretrained": str(whole / "iter_0000037"), "batch": 4, "iters": 12, "interval": 4}
    for attempt, kill in enumerate((4, 8), start=1):
        done = launch(PROGRAM, directory, 1, python=python, attempt=attempt, kill=kill, **options)
        assert done.returncode != 0 and "SIGKILL" in done.stderr, done.stderr[-6000:]
    # Both have begun from the same weights.
    first = [[line["loss"] for line in lines(directory) if line["attempt"] == attempt] for attempt in (1, 2)]
    assert first[0] == first[1][:8] and first[0][0] < 4
    said = run(python, directory, 1, attempt=3, **options)
    assert "repeated 0 skipped 0 | step 4 from iter_0000004" in said
    assert items(trained(directory)) == order[:96]


@release(
    "Megatron-Bridge: three launches",
    "`tests/hosts/megatron_bridge/test_parts.py::test_settings_that_are_refused`, "
    "`tests/hosts/megatron_bridge/test_parts.py::test_loaders_that_are_refused`",
)
def test_what_is_refused(python: str, killed: Path, copy: Path, tmp_path: Path) -> None:
    (copy / "iter_0000016" / "train_state.pt").unlink()
    said = run(python, copy, 1, attempt=2, batch=4, iters=9)
    assert "passed over iter_0000016" in said and "step 8 from iter_0000008" in said
    for path in copy.glob("latest_*"):  # by which Bridge knows that there is anything to load
        path.unlink()
    assert "has lost latest_train_state.pt" in refusal(python, copy, 1, attempt=3, batch=4)
    (tmp_path / "other").mkdir()
    other = copied(killed, tmp_path / "other")
    shutil.rmtree(other / "megaresume")
    assert "the checkpoint has no data state" in refusal(python, other, 1, attempt=2, batch=4)
