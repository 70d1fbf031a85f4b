"""``megaresume run``: the script sees what ``python SCRIPT`` shows it, and ends as it would have ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.megatron.layouts import run_python, write_lm
from tests.release import release

pytestmark = pytest.mark.process

RUN = ("-m", "megaresume.run")
CLI = ("-m", "megaresume", "run")

#: Everything that a script may look at, as JSON.
LOOK = """
import __main__, json, sys
def here(): pass
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__, "spec": repr(__spec__),
    "package": __package__, "names": sorted(set(vars()) - {"here"}),
    "loader": type(__loader__).__name__, "builtins": repr(__builtins__),
    "annotations": __annotations__, "main": __main__.here is here, "cached": __cached__, "doc": __doc__,
    "module": here.__module__, "filename": here.__code__.co_filename, "hook": sys.excepthook is sys.__excepthook__,
}))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A checkout with scripts in it."""
    return write_lm(tmp_path_factory.mktemp("checkout"))


def look(*words, root, path, cwd):
    done = run_python(*words, path=[root, *path], cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("launcher", [RUN, CLI], ids=["module", "program"])
@pytest.mark.parametrize("way", ["absolute", "relative", "link"])
def test_what_a_script_sees(root, tmp_path, launcher, way):
    real = root / "scripts" / "look.py"
    real.parent.mkdir(exist_ok=True)
    real.write_text(LOOK)
    (tmp_path / "link.py").symlink_to(real)
    target = {"absolute": str(real), "relative": os.path.relpath(real, tmp_path), "link": "link.py"}[way]
    # Ends, dashes, underscores, and what argparse would eat are the script's.
    args = ["--seq_length", "5", "--", "-m", "--help", "--json", "", "a b"]
    plain = look(target, *args, root=root, path=(), cwd=tmp_path)
    ours = look(*launcher, target, *args, root=root, path=(), cwd=tmp_path)
    assert ours == plain
    assert plain["argv"] == [target, *args]


def test_what_a_module_sees(root, tmp_path):
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name in ("look", "__main__"):
        (package / f"{name}.py").write_text(LOOK.replace('"spec": repr(__spec__)', '"spec": __spec__.name'))
    for name in ("trainer.look", "trainer"):
        plain = look("-m", name, "--x", root=root, path=(), cwd=tmp_path)
        assert look(*RUN, "-m", name, "--x", root=root, path=(), cwd=tmp_path) == plain
        assert plain["spec"].startswith("trainer.")


ENDINGS = {
    "value error": "def f():\n    raise ValueError('x')\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('k') from e",
    "group": "raise ExceptionGroup('g', [ValueError(1)])",
    "syntax": "x = = 3",
    "encoding": "# -*- coding: latin-1 -*-\nprint('\u00e9')\nraise ValueError",
    "interrupt": "raise KeyboardInterrupt",
    "exit": "import sys; sys.exit(7)",
    "exit words": "import sys; sys.exit('words')",
    "exit none": "import sys; sys.exit()",
    "hard": "import os; print('x', flush=True); os._exit(5)",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "end": "import atexit; atexit.register(print, __name__); print('end')",
    "own hook": "import sys, traceback as t\nsys.excepthook = lambda *e: print('mine', len(t.extract_tb(e[2])))\n1 / 0",
    "thread": "import threading; threading.Thread(target=lambda: 1 / 0, name='T').start()",
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("launcher", [RUN, CLI], ids=["module", "program"])
def test_how_a_script_ends(root, tmp_path, launcher, ending):
    path = tmp_path / "pretrain.py"
    path.write_bytes(ENDINGS[ending].encode("latin-1" if ending == "encoding" else "utf-8"))
    plain = run_python("pretrain.py", path=[root], cwd=tmp_path)
    ours = run_python(*launcher, "pretrain.py", path=[root], cwd=tmp_path)
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_ctrl_c(root, tmp_path):
    """As a terminal sends it: the status is that of a process that the signal ended."""
    path = tmp_path / "pretrain.py"
    path.write_text("import time\nprint('on', flush=True); time.sleep(600)\n")
    endings = []
    for launcher in ((), RUN):
        # Wherever in the line the signal comes: the traceback names the line alone.
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONNODEBUGRANGES": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        # A job in the background of a shell ignores the signal, and would hand that on.
        process = subprocess.Popen(
            [sys.executable, *launcher, str(path)],
            env=environment,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            **pipes,
        )
        assert process.stdout is not None and process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGINT)
        endings.append((process.communicate()[1], process.returncode))
    assert endings[0][0] == endings[1][0]
    assert endings[0][1] == -signal.SIGINT and endings[1][1] in (-signal.SIGINT, 130)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no script was given"),
        (("nowhere.py", "--x"), "there is no script nowhere.py"),
        (("--lr", "3"), "what should be a script is a flag: --lr"),
        (("-m",), "no script was given"),
        (("-m", "no.such.module"), "there is no module no.such.module"),
        ((".",), "there is no script ."),
    ],
)
def test_bad_usage_is_status_2(tmp_path, words, message):
    done = run_python(*RUN, *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"megaresume: error: {message}") and "Traceback" not in done.stderr


def test_help():
    done = run_python(*CLI, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: megaresume run SCRIPT")


FAILS = """
import sys, time
from megaresume.stream.errors import StateError
if sys.argv[-1] == "torch":
    import torch.distributed as dist
    dist.init_process_group("gloo")
error = StateError("no data state", found="nothing", action="--x")
error.known_to_all_ranks = "shared" in sys.argv
if "alone" not in sys.argv or __import__("os").environ["RANK"] == "1":
    raise error
time.sleep(3600)
"""


def test_our_errors_are_messages(root, tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    done = run_python(*RUN, "fails.py", path=[root], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "megaresume: error: no data state\n  found:        nothing\n  next action:  --x\n"


def torchrun(*words, root, cwd):
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words)
    return run_python(*command, path=[root], cwd=cwd, OMP_NUM_THREADS="1")


RELEASE = release(
    "`[all-torch]`, `[all]`: two more launches",
    "the same, `[shared-torch]`",
)


@pytest.mark.parametrize(
    "words",
    [
        ("shared", "torch"),
        pytest.param(("all", "torch"), marks=RELEASE),
        pytest.param(("all",), marks=RELEASE),
    ],
    ids="-".join,
)
def test_our_errors_are_said_once_a_job(root, tmp_path, words):
    (tmp_path / "fails.py").write_text(FAILS)
    done = torchrun(*RUN, "fails.py", *words, root=root, cwd=tmp_path)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "no data state" in line]
    assert said[0] == "megaresume: error: no data state"
    # Rank 1 waits 2 seconds for its launcher to end it, which on a busy machine takes longer; where the ranks can talk
    # to each other it says nothing.
    assert said[1:] in ([],) if words[0] == "shared" else said[1:] in ([], ["megaresume: error: rank 1: no data state"])
    assert "StateError" not in done.stderr  # as it would stand in a traceback


RELEASE_2 = release(
    "`[alone]`: one more launch",
    "the same, `[alone-torch]`",
)


@pytest.mark.parametrize("words", [("alone", "torch"), pytest.param(("alone",), marks=RELEASE_2)], ids="-".join)
def test_an_error_of_one_rank_ends_the_job(root, tmp_path, words):
    (tmp_path / "fails.py").write_text(FAILS)
    done = torchrun(*RUN, "fails.py", *words, root=root, cwd=tmp_path)
    assert done.returncode != 0
    assert "megaresume: error: rank 1: no data state" in done.stderr


def test_torchrun_starts_it(root, tmp_path):
    (tmp_path / "look.py").write_text("import os, sys\nos.write(1, f'{sys.argv} {sys.path[0]}\\n'.encode())\n")
    done = torchrun(*RUN, "look.py", "--x", root=root, cwd=tmp_path)
    assert done.stdout == f"['look.py', '--x'] {tmp_path}\n" * 2, done.stderr


def test_deepspeed_starts_it(root, tmp_path):
    (tmp_path / "look.py").write_text("import os, sys\nos.write(1, f'{sys.argv} {sys.path[0]}\\n'.encode())\n")
    pytest.importorskip("deepspeed")
    program = Path(sys.executable).with_name("deepspeed")
    command = [program, "--num_gpus", "1", "--module", "megaresume.run", "look.py", "--x"]
    done = run_python(*command, path=[root], cwd=tmp_path, DS_ACCELERATOR="cpu")
    # Its launcher puts the rank before the script; the script gets it as if it had been started itself.
    assert f"['look.py', '--local_rank=0', '--x'] {tmp_path}\n" in done.stdout, done.stderr


def test_it_costs_little(root, tmp_path):
    """Before the script starts: some hundredths of a second of processor time, and neither NumPy nor torch."""
    (tmp_path / "light.py").write_text(
        "import sys, time\nprint({'numpy', 'torch', 'numba', 'yaml'} & set(sys.modules), time.process_time())\n"
    )
    seconds = {}
    for launcher in (RUN, ()):
        done = [run_python(*launcher, "light.py", path=[root], cwd=tmp_path).stdout.split() for _ in range(5)]
        assert {words[0] for words in done} == {"set()"}
        seconds[launcher] = min(float(words[1]) for words in done)
    assert seconds[RUN] - seconds[()] < 0.3
