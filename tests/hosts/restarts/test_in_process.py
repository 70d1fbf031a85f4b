"""NVIDIA's resiliency extension: its Wrapper calls a loop again in the same processes, which is attached again there.

By hand, without it, also in the middle of a save: `tests/hosts/torch/test_attached_again.py`.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.hosts.restarts.agents import PROGRAM
from tests.hosts.restarts.program import GLOBAL, judge
from tests.hosts.torch.record import launch
from tests.release import release

ROOT = Path(__file__).parents[3]
#: which torch does not bring; the package asks for a pynvml that only warns.
PACKAGES = ("nvidia-resiliency-ext==0.4.1", "defusedxml", "nvidia-ml-py", "pynvml")


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An environment that has it, and sees the packages of the running one."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv").glob("lib/*/site-packages")
    (site / "parent.pth").write_text(sysconfig.get_path("purelib"))
    executable = str(tmp_path / "venv" / "bin" / "python")
    done = subprocess.run([executable, "-m", "pip", "install", "-q", "--no-deps", *PACKAGES], capture_output=True)
    assert done.returncode == 0, done.stderr
    return executable


@release("NVIDIA's resiliency extension, which no extra installs", "`tests/hosts/torch/test_attached_again.py`")
def test_a_wrapper_calls_the_loop_again(python: str, tmp_path: Path) -> None:
    """Two ranks; one fails in a step, the other one in a step, one in a save; the run ends as if nothing had been."""
    steps, faults = 16, [(1, 5, "step"), (0, 8, "step"), (1, 9, "save")]
    program = PROGRAM.with_name("in_process.py")
    done = launch(program, tmp_path / "job", 2, python=python, faults=faults, steps=steps, save_every=3, seconds=0.0)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    whole = launch(PROGRAM, tmp_path / "whole", 1, steps=steps, save_every=steps)
    assert whole.returncode == 0, whole.stderr[-3000:]
    found, expected = judge(tmp_path / "job"), judge(tmp_path / "whole")
    assert found.steps == expected.steps and set(found.ranks.values()) == {2} and found.again >= 3
    assert all(len(items) == GLOBAL for items in found.steps.values())
    for step, weights in found.weights.items():
        assert weights == pytest.approx(expected.weights[step], rel=1e-5)
    processes = {path.stem.split("_")[-1] for path in (tmp_path / "job" / "record").iterdir()}
    assert len(processes) == 2, "the same ones to the end"
