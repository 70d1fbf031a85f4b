"""Scripts with Hugging Face's Trainer, and no line of megaresume, under the launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.release import release

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import megaresume
from megaresume import run
from megaresume.checkpoint.load.choose import choose
from megaresume.cluster.processes import LocalJob
from megaresume.hosts.hugging_face_launch import SETTINGS_VARIABLE, take_flags
from megaresume.stream.errors import UsageError
from tests.hosts.hugging_face.program import ITEMS, make
from tests.hosts.megatron.layouts import run_python, write_lm
from tests.hosts.torch.record import ENVIRONMENT, ROOT, items, lines, trained

PLAIN = Path(__file__).with_name("plain.py")


def launch(output: Path, ranks: int, *flags: str, script: Path = PLAIN, **options: Any) -> tuple[int, str]:
    """The script under the launcher: exit status and output."""
    words, log = [str(script), str(output), json.dumps(options), *flags], output.with_suffix(".output")
    with LocalJob(str(run.__file__), words, num_processes=ranks, output=log, launcher="env", env=ENVIRONMENT) as job:
        return job.wait(), job.text()


@pytest.mark.process
def test_killed_in_a_save_and_resumed(tmp_path: Path) -> None:
    trainer = make(tmp_path / "whole", num_train_epochs=1)
    megaresume.attach(trainer)
    trainer.train()
    order = items(trained(tmp_path / "whole"))
    assert sorted(order) == list(range(ITEMS))
    output = tmp_path / "run"
    status, text = launch(output, 2, num_train_epochs=1, kill=("save", 10))
    assert status == -signal.SIGKILL, text[-3000:]
    # As scripts do that look for the newest checkpoint by its name: this one is half-written.
    newest = str(output / "checkpoint-10")
    assert os.path.isdir(newest)
    flags = ("--megaresume-stop-file", str(tmp_path / "stop"), "--megaresume_stop_status=7")
    status, text = launch(output, 1, *flags, num_train_epochs=1, attempt=2, resume=newest, kill=("stop", 12))
    assert status == 7, text[-3000:]
    assert "step 5 from checkpoint-5" in text and "repeated 0 skipped 0" in text
    choice = choose(output)
    assert choice is not None and choice.iteration == 12
    status, text = launch(output, 1, num_train_epochs=1, attempt=3, resume=False)
    assert status == 0, text[-3000:]
    assert next(line["step"] for line in lines(output) if line["attempt"] == 3) == 13
    assert items(trained(output)) == order


STARTS_IT = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)
"""


@pytest.mark.process
@release(
    "four processes, two of which train",
    "`::test_killed_in_a_save_and_resumed`, `tests/hosts/megatron/test_launcher.py::test_children`",
)
def test_in_a_process_that_the_script_starts(tmp_path: Path) -> None:
    (tmp_path / "start.py").write_text(STARTS_IT)
    options = {"max_steps": 10, "kill": ["interrupt", 7]}
    for attempt in (1, 2):
        words = [str(tmp_path / "start.py"), str(PLAIN), str(tmp_path / "run"), json.dumps(options)]
        done = python("-m", "megaresume.run", *words, "--megaresume-keep-every", "10", cwd=tmp_path)
        assert (done.returncode == 0) == (attempt == 2), done.stderr
        options |= {"attempt": 2, "kill": ["", 0]}
    assert "step 5 from checkpoint-5" in done.stdout
    assert len(set(items(trained(tmp_path / "run")))) == 40


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ENVIRONMENT
    return subprocess.run([sys.executable, *words], env=environment, cwd=cwd, capture_output=True, text=True)


LOOP = """
import sys
import torch
model = torch.nn.Linear(1, 1)
torch.optim.SGD(model.parameters(), lr=0.1).step()
print("trained", sys.argv[1:])
"""


@pytest.mark.process
@release(
    "a training",
    "`tests/hosts/hugging_face/test_trainer.py::test_attached_once_and_trained_once`",
)
def test_two_trainers_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(PLAIN.read_text().replace('if __name__ == "__main__":', "for _ in range(2):"))
    options = json.dumps({"max_steps": 2})
    done = python("-m", "megaresume.run", "two.py", str(tmp_path / "run"), options, cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "megaresume: error: two Trainers of one process have the same output_dir" in done.stderr


@pytest.mark.process
def test_a_script_that_changes_the_path_and_does_not_name_transformers(tmp_path: Path) -> None:
    """It may be Megatron's, and its end does not say that nothing was trained."""
    (tmp_path / "theirs.py").write_text(PLAIN.read_text())
    words = ["theirs.py", str(tmp_path / "run"), json.dumps({"max_steps": 2})]
    (tmp_path / "mine.py").write_text(
        f"import runpy, sys\nsys.path[:0] = []\nsys.argv = {words}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    done = python("-m", "megaresume.run", "mine.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nothing was trained" not in done.stderr
    assert [line["step"] for line in lines(tmp_path / "run")][-1] == 2


@pytest.mark.process
def test_a_loop_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    done = python("-m", "megaresume.run", "loop.py", cwd=tmp_path)
    assert done.returncode == 1 and "trained" not in done.stdout
    assert done.stderr.startswith("megaresume: error: training begins, and megaresume does not know its data")
    (tmp_path / "start.py").write_text(STARTS_IT)
    done = python("-m", "megaresume.run", "start.py", "loop.py", cwd=tmp_path)
    assert done.returncode == 1 and "trained" not in done.stdout and "Traceback" not in done.stderr
    assert done.stderr.startswith("megaresume: error: training begins, and megaresume does not know its data")
    done = python("-m", "megaresume.run", "loop.py", "--x", "--megaresume-mode", "off", "y", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "trained ['--x', 'y']\n")


def test_flags_are_taken_from_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, "")
    assert take_flags(["train", "a.yaml", "--", "-m", "lr=3"]) == ["train", "a.yaml", "--", "-m", "lr=3"]
    assert os.environ[SETTINGS_VARIABLE] == "{}"
    words = ["train", "--no-megaresume-checksums", "a.yaml", "--megaresume_keep_every=5", "--lr", "-3"]
    assert take_flags([*words, "--megaresume-append", "now"]) == ["train", "a.yaml", "--lr", "-3"]
    said = json.loads(os.environ[SETTINGS_VARIABLE])
    checkpoints = {"checksums": False, "compare_frozen": True, "keep_every": 5}
    assert said == {"launch": {"append": "now"}, "checkpoints": checkpoints}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--megaresume-mode", "guard"], "this mode is for Megatron"),
        (["--megaresume-keep-last", "3"], "set save_total_limit of the Trainer"),
        (["--megaresume-data", "data.yaml"], r"unknown flag\n.*--megaresume-data"),
        (["--megaresume-keep-every", "often"], "invalid int value"),
    ],
)
def test_flags_that_a_trainer_does_not_have(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, "")
    with pytest.raises(UsageError, match=message):
        take_flags(["train.py", *words])


@pytest.mark.parametrize("package", ["transformers", "trl", "peft"])
def test_a_script_that_changes_the_path(package: str, tmp_path: Path) -> None:
    # As TRL's grpo.py does: it names transformers nowhere, and is no script of Megatron's, whose flags are left to it.
    script = tmp_path / "train.py"
    script.write_text(f"import sys\n\nfrom {package} import Anything\n\nsys.path.insert(0, '.')\n")
    assert not run._trains_with_megatron(str(script))


@pytest.mark.process
def test_megatron_core_of_pip_says_nothing_of_a_script(tmp_path: Path) -> None:
    root, script = write_lm(tmp_path, (0, 19)), tmp_path / "train.py"
    script.write_text("from ours import main\n")
    code = "import sys; from megaresume import run; print(run._trains_with_megatron(sys.argv[1]))"

    def answer() -> str:
        return run_python("-c", code, script, path=[root, ROOT]).stdout.strip()

    assert answer() == "True"  # a checkout on the path
    (root / "megatron_core-0.19.2.dist-info").mkdir()
    assert answer() == "False"
    script.write_text("from megatron.training import pretrain\n")
    assert answer() == "True"
