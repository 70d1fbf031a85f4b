"""``megaresume new``: every starting point runs as it is written, is killed, and continues exactly."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from megaresume.cluster.new import STARTS
from tests.cli.conftest import megaresume
from tests.packaging.conftest import ROOT
from tests.warm import run_program

#: trainer -> the package that it is a starting point for.
PACKAGES = {"torch": "torch", "trainer": "transformers", "accelerate": "accelerate", "lightning": "lightning"}
PACKAGES |= {"deepspeed": "deepspeed", "vlm": "PIL", "megatron": "megatron.core"}
MINI = ROOT / "tests" / "hosts" / "megatron" / "mini"
#: not for the reader: without a GPU, DeepSpeed would compile a collective first, for minutes.
PRELUDE = 'import deepspeed\ndeepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False\n'
#: Megatron's pretrain_gpt.py, played by the stand-in of these tests, which has no flags of a model.
PRETRAIN = f"""
import runpy, sys
sys.path.insert(0, {str(MINI)!r})
assert "--eval-interval" in sys.argv, "since core 0.17 there is no default, and Megatron divides by it"
start = sys.argv.index("--num-layers")
end = sys.argv.index("--micro-batch-size")
del sys.argv[start:end]
interval = sys.argv.index("--log-interval")
del sys.argv[interval:interval + 2]
sys.argv += ["--vocab-size", "257", "--mini-log", "log"]
runpy.run_path({str(MINI / "pretrain_until_0_17.py")!r}, run_name="__main__")
"""


def environment() -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return env | {
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
    }


def steps_of(status: int, lines: list[str], kill_at: int | None) -> list[str]:
    """Of a program that ended as it should."""
    assert (status == 0) == (kill_at is None), "\n".join(lines[-30:])
    return [line for line in lines if re.match(r"step \d+ ", line)]


def forked_lines_of(directory: Path, command: list[str], kill_at: int | None = None) -> list[str]:
    """`command_lines_of`, of a process that need not import the trainer."""
    end = "" if kill_at is None else f"step {kill_at} "
    output = directory / f"output-{time.monotonic_ns()}"
    return steps_of(*run_program(command[1:], environment(), directory, output, kill_at=end), kill_at)


def command_lines_of(directory: Path, command: list[str], kill_at: int | None = None) -> list[str]:
    """``step N loss X`` as the program prints them; killed with SIGKILL as soon as it says a step."""
    lines: list[str] = []
    with subprocess.Popen(
        command,
        cwd=directory,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if kill_at is not None and re.match(rf"step {kill_at} ", line):
                program = psutil.Process(process.pid)
                for one in [program, *program.children(recursive=True)]:  # torchrun's ranks have sessions of their own
                    one.kill()
        status = process.wait()
    return steps_of(status, lines, kill_at)


@pytest.mark.parametrize("name", ["hugging-face", "hf"])
def test_the_trainer_by_the_name_of_its_extra(tmp_path: Path, name: str) -> None:
    done = megaresume("new", name, tmp_path / "here")
    assert done.returncode == 0, done.stderr
    assert STARTS["trainer"].extra in done.stdout


@pytest.mark.parametrize("name", STARTS)
def test_it_is_short_and_not_written_over_anything(tmp_path: Path, name: str) -> None:
    if find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    done = megaresume("new", name, tmp_path / "here")
    program = tmp_path / "here" / STARTS[name].program
    assert done.returncode == 0 and STARTS[name].command in done.stdout
    assert len(program.read_text().splitlines()) <= 40
    assert (tmp_path / "here" / "data.yaml").exists() == (STARTS[name].data is not None)
    program.write_text("mine")
    again = megaresume("new", name, tmp_path / "here")
    assert again.returncode == 2 and STARTS[name].program in again.stderr and program.read_text() == "mine"


@pytest.mark.process
@pytest.mark.parametrize("name", [name for name in STARTS if name != "megatron"])
def test_it_runs_and_goes_on_exactly_after_a_kill(tmp_path: Path, name: str) -> None:
    if find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    megaresume("new", name, tmp_path / "whole")
    program, steps, kill_at = tmp_path / "whole" / STARTS[name].program, 160, 70
    if name == "deepspeed":
        program.write_text(PRELUDE + program.read_text())
    if name == "vlm":  # a step of it takes ten times as long as one of the others
        text = program.read_text()
        assert text.count("160  #") == 1
        steps, kill_at = 60, 50
        program.write_text(text.replace("160  #", f"{steps}  #"))
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    command = STARTS[name].command.split()
    # The command is the same for most: torch's is given as a user gives it.
    lines_of = forked_lines_of if command == ["python", "train.py"] and name != "torch" else command_lines_of
    whole = lines_of(tmp_path / "whole", command)
    assert [int(line.split()[1]) for line in whole] == list(range(1, steps + 1))
    killed = lines_of(tmp_path / "cut", command, kill_at=kill_at)
    assert killed == whole[: len(killed)]
    resumed = lines_of(tmp_path / "cut", command)
    # From the last checkpoint on, each step again with the loss that it has in the undisturbed run.
    saved = kill_at // 20 * 20
    assert steps - saved <= len(resumed) <= steps - saved + 20 and resumed == whole[-len(resumed) :]
    assert megaresume("latest", tmp_path / "cut" / _saves(name), "--iteration").stdout.strip() == str(steps)
    if name == "torch":  # whose data ends with the run
        assert megaresume("plan", tmp_path / "cut" / _saves(name)).stdout.startswith("FINISHED: global_step160 ")


@pytest.mark.process
def test_megatrons_script_starts_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    megaresume("new", "megatron", tmp_path)
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "pretrain_gpt.py").write_text(PRETRAIN)
    env = {"MEGATRON": str(tmp_path / "clone"), "PYTHONPATH": str(ROOT), "MINI_KILL": "step:70"}
    env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TORCHDYNAMO_DISABLE": "1"}

    def train(log: Path) -> tuple[int, str]:
        # Into a file: a killed rank leaves megatron-core's writer of checkpoints behind, which would hold a pipe open.
        with open(log, "w") as file:
            done = subprocess.run(["bash", "train.sh"], cwd=tmp_path, env=os.environ | env, stdout=file, stderr=file)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == str(tmp_path):
                    process.kill()
        return done.returncode, log.read_text()

    status, text = train(tmp_path / "killed.log")
    assert status != 0 and "SIGKILL" in text, text[-3000:]
    del env["MINI_KILL"]
    status, text = train(tmp_path / "resumed.log")
    assert status == 0 and "megaresume: resumed at sample 480 " in text, text[-3000:]
    assert megaresume("latest", tmp_path / "checkpoints", "--iteration").stdout.strip() == "160"


def _saves(name: str) -> str:
    return {"lightning": "checkpoints/run", "accelerate": "checkpoints/checkpoints"}.get(name, "checkpoints")


def test_a_full_disk_leaves_nothing_in_the_way(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, hard))  # train.py is shorter, and the corpus is not
    try:
        done = megaresume("new", "deepspeed", tmp_path / "here")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.returncode == 1 and f"cannot write {tmp_path}" in done.stderr
    assert not (tmp_path / "here").exists()
    assert megaresume("new", "deepspeed", tmp_path / "here").returncode == 0
