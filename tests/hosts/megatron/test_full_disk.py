"""A disk that is full under Megatron-LM: our part of a save is tried again, Megatron's is not touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaresume.checkpoint.load.choose import choose
from tests.hosts.megatron.conftest import Mini
from tests.release import release

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.process


RELEASE = release(
    "`[asynchronous]`: three more runs",
    "the same, `[synchronous]`",
)


@pytest.mark.parametrize(
    "asynchronous",
    [pytest.param(False, id="synchronous"), pytest.param(True, id="asynchronous", marks=RELEASE)],
)
def test_a_disk_that_is_cleaned(mini: Mini, data_yaml: Path, small_disk: Path, asynchronous: bool) -> None:
    """Before Megatron's files, and after its tracker; and a commit that fails to the end takes none of its files."""
    save = small_disk / ("asynchronous" if asynchronous else "synchronous")
    save.mkdir()
    flags = ["--megaresume-data", data_yaml, "--seed", 7, "--seq-length", 32, "--vocab-size", 65, "--save-interval", 1]
    flags += ["--micro-batch-size", 2, "--global-batch-size", 8, "--save", save, "--load", save]
    flags += ["--megaresume-save-retry-wait", 0.01, *(["--async-save"] if asynchronous else [])]

    first = mini(*flags, "--train-iters", 3, env={"MINI_FILL": "step:2:1,tracker:3:2"})
    assert first.status == 0, first.output[-3000:]
    for iteration, failures in enumerate((0, 1, 2), start=1):
        assert first.output.count(f"saving checkpoint at iteration {iteration:7d}") == 1
        assert first.output.count(f"megaresume: iter_{iteration:07d} was not saved: ") == failures
    assert "No space left on device" in first.output and "try 2 of 3 in 0.02 s" in first.output
    choice = choose(save, checksums=True)
    assert choice is not None and choice.tag == "iter_0000003" and choice.rejected == ()

    goes_on = ["--megaresume-save-retries", 0, "--megaresume-on-save-failure", "continue"]
    second = mini(*flags, *goes_on, "--train-iters", 5, env={"MINI_FILL": "tracker:4:1"})
    assert second.status == 0, second.output[-3000:]
    assert "; the run continues without this checkpoint" in second.output and sorted(second.steps()) == [4, 5]
    third = mini(*flags, "--ckpt-step", 4, "--train-iters", 5)
    assert third.status == 0 and "step 4 from iter_0000004" in third.output, third.output[-3000:]
    assert third.steps()[5] == second.steps()[5]
