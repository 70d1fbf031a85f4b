"""docs/before-a-launch.md: its launch lines, run by bash, with programs that only tell how they were called."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "before-a-launch.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL)
CALLS = ["torchrun", "deepspeed", "verl", "python3 train.py", "llamafactory-cli"]


def lay_out(root: Path, call: str) -> str:
    """A complete checkpoint of step 4 and an incomplete one of step 6; returns what the launch must name."""
    from tests.cli.test_latest import write_hugging_face, write_megatron, write_verl, write_zero

    write = {"torchrun": write_megatron, "deepspeed": write_zero, "verl": write_verl}.get(call, write_hugging_face)
    path = write(root, 4)
    write(root, 6, complete=False)
    names = {
        "torchrun": "--ckpt-step 4",
        "deepspeed": "--load-tag global_step4",
        "verl": f"trainer.resume_mode=resume_path trainer.resume_from_path={path}",
        "python3 train.py": f"--resume_from_checkpoint {path}",
        "llamafactory-cli": f"resume_from_checkpoint={path}",
    }
    return names[call]


@pytest.mark.process
@pytest.mark.parametrize("call", CALLS)
def test_launch_lines(call: str, tmp_path: Path) -> None:
    (block,) = [block for block in BLOCKS if call in block]
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("torchrun", "deepspeed", "python3", "llamafactory-cli"):
        (programs / name).write_text(f'#!/bin/bash\necho {name} "$@"\n')
    (programs / "megaresume").write_text(f'#!/bin/bash\nexec {sys.executable} -m megaresume "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)

    def launch() -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2])}
        command = ["bash", "-e", "-c", block]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)

    first = launch()
    assert first.returncode == 0 and "resume" not in first.stdout and "step" not in first.stdout
    assert "checkpoints/" in first.stdout
    expected = lay_out(tmp_path / "checkpoints", call)
    again = launch()
    assert again.returncode == 0 and expected in again.stdout
    assert "megaresume: not " in again.stderr
