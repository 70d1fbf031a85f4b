"""`megaresume.attach` in real loops on gloo: killed, and resumed on other ranks, sizes and data.

What a loop trained it writes down itself: `program.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.load.choose import choose
from megaresume.cluster.processes import free_port
from megaresume.program import main
from tests.hosts.conftest import write_corpus
from tests.hosts.torch.program import run
from tests.hosts.torch.record import ENVIRONMENT, items, launch, launch_forked, lines, losses, trained
from tests.release import release

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("program.py")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three epochs with one rank, which nobody stops."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    run(directory, save_every=50)
    return directory


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with two ranks under DDP, killed in the second epoch: in the middle of the save of step 24."""
    directory = tmp_path_factory.mktemp("killed") / "run"
    status, output = launch_forked(PROGRAM, directory, 2, batch=2, save_every=8, kill=("save", 24))
    assert status == -signal.SIGKILL, output[-3000:]
    assert (directory / "global_step24").is_dir()
    return directory


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 2, "accumulation": 4, "writer": "torch", "num_workers": 2},
        {"batch": 4, "accumulation": 1, "writer": "dcp_async"},
    ],
    ids=["one_file_and_workers", "asynchronous"],
)
def test_two_ranks_to_one_and_another_writer(copy: Path, order: list[int], options: Any) -> None:
    run(copy, attempt=2, save_every=50, **options)
    assert items(trained(copy)) == order
    assert main(["verify", str(copy)]) == 0
    choice = choose(copy)
    assert choice is not None and choice.iteration == len(trained(copy))


def test_a_save_on_rank_0_alone(tmp_path: Path) -> None:
    done = launch(PROGRAM, tmp_path / "run", 2, batch=2, save_every=3, kill=("alone", 3), patience=3)
    assert done.returncode != 0
    assert "loop.save() was called on some ranks only" in done.stderr, done.stderr[-3000:]
    assert "ranks 0 of 2" in done.stderr and choose(tmp_path / "run") is None
    assert done.stdout.count("WARNING: ranks 0 of 2 wait in loop.save() for the others") == 1, done.stdout


def test_a_rank_is_gone_while_another_waits_to_save(tmp_path: Path) -> None:
    """As if its node was lost, whose launcher does not end the others: they notice, and need not wait until they give
    up."""
    words = [sys.executable, str(PROGRAM), str(tmp_path / "run")]
    words.append(json.dumps({"batch": 2, "save_every": 3, "kill": ("gone", 3), "patience": 600}))
    env = os.environ | ENVIRONMENT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    first, second = (
        subprocess.Popen(words, env=env | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True) for rank in range(2)
    )
    _, said = first.communicate(timeout=120)
    second.communicate()
    assert (first.returncode, second.returncode) == (1, -signal.SIGKILL)
    assert "a rank has ended while others waited for it in loop.save()" in said and choose(tmp_path / "run") is None


def test_a_save_that_is_being_written_when_a_run_is_refused(tmp_path: Path) -> None:
    """It counts: ranks that end with an error first commit what they have begun, as at any other end."""
    done = launch(PROGRAM, tmp_path / "run", 2, batch=2, save_every=3, writer="dcp_async", kill=("refused", 6))
    assert done.returncode != 0 and "something is refused" in done.stderr, done.stderr[-3000:]
    choice = choose(tmp_path / "run")
    assert choice is not None and choice.iteration == 6


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("writer", ["dcp_async", "torch"])
def test_the_losses_are_those_of_a_run_that_nobody_stopped(whole: Path, tmp_path: Path, writer: str) -> None:
    def interrupt(loop: Any) -> None:
        if loop.step == 17:
            loop.close()
            raise Interrupted

    directory = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(directory, writer=writer, save_every=13, watch=interrupt, checkpoints={"keep_last": 1})
    run(directory, attempt=2, writer=writer, save_every=13, checkpoints={"keep_last": 1})
    assert next(line["step"] for line in lines(directory) if line["attempt"] == 2) == 14
    assert losses(directory) == losses(whole)
    assert [path.name for path in directory.glob("global_step*")] == ["global_step38"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("text")
    write_corpus(directory / "web", documents=200, seed=1)
    (directory / "data.yaml").write_text("seed: 7\nseq_length: 32\nsources:\n  web: {path: web}\n")
    return str(directory / "data.yaml")


def test_packed_text_and_another_batch_size(text: str, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    run(directory, data=text, steps=6, save_every=3)
    run(directory, attempt=2, data=text, steps=9, batch=2, accumulation=1, num_workers=1, load={"tag": "global_step3"})
    assert items(trained(directory)) == list(range(36))
    assert [len(step) for step in trained(directory)] == [8] * 3 + [2] * 6
    assert main(["verify", str(directory)]) == 0


@release(
    "twelve launches of two ranks and more",
    "`::test_two_ranks_to_one_and_another_writer`, `::test_the_losses_are_those_of_a_run_that_nobody_stopped`",
)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.parametrize("writer", ["dcp", "dcp_async", "torch"])
def test_every_writer_and_wrapper_on_two_ranks(tmp_path: Path, order: list[int], writer: str, parallel: str) -> None:
    options = {"batch": 2, "writer": writer, "parallel": parallel}
    done = launch(PROGRAM, tmp_path / "run", 2, kill=("save", 20), **options)
    assert done.returncode != 0 and "SIGKILL" in done.stderr, done.stderr[-3000:]
    done = launch(PROGRAM, tmp_path / "run", 2, attempt=2, **options)
    assert done.returncode == 0 and "random state restored" in done.stdout, done.stderr[-3000:]
    assert items(trained(tmp_path / "run")) == order
    whole = launch(PROGRAM, tmp_path / "whole", 2, **options)
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@release(
    "five launches",
    "`::test_two_ranks_to_one_and_another_writer`",
)
def test_killed_again_and_again_on_one_rank_and_on_two(tmp_path: Path, order: list[int]) -> None:
    for attempt, (ranks, step, where, batch, workers, parallel, writer) in enumerate(
        [
            (1, 7, "step", 4, 0, "ddp", "dcp"),
            (2, 10, "save", 2, 1, "fsdp2", "dcp_async"),
            (1, 13, "step", 3, 2, "ddp", "torch"),
            (2, 20, "save", 1, 0, "ddp", "dcp"),
            (2, 0, "", 3, 1, "fsdp2", "torch"),
        ]
    ):
        options = {"batch": batch, "num_workers": workers, "parallel": parallel, "writer": writer}
        done = launch(PROGRAM, tmp_path / "run", ranks, attempt=attempt, kill=(where, step), **options)
        assert (done.returncode == 0) == (not where), done.stderr[-3000:]
    assert items(trained(tmp_path / "run")) == order


@release(
    "two launches of two ranks",
    "`::test_packed_text_and_another_batch_size`",
)
def test_packed_text_on_two_ranks(text: str, tmp_path: Path) -> None:
    options = {"data": text, "steps": 12, "batch": 2, "save_every": 5}
    done = launch(PROGRAM, tmp_path / "run", 2, kill=("save", 10), **options)
    assert done.returncode != 0 and "SIGKILL" in done.stderr, done.stderr[-3000:]
    done = launch(PROGRAM, tmp_path / "run", 2, attempt=2, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert items(trained(tmp_path / "run")) == list(range(96))
