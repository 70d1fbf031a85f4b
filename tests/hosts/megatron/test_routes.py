"""`provider` and `extra_args_provider` in scripts that are edited: before or after the imports, with the hooks in."""

from __future__ import annotations

import argparse
import functools
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import megaresume
from megaresume.cluster.processes import LocalJob
from megaresume.hosts.megatron import hooks
from megaresume.stream.errors import SetupError, UsageError
from tests.hosts.megatron.conftest import MINI, SCRIPTS
from tests.hosts.megatron.layouts import DOUBLES, run_python, script, write_lm
from tests.hosts.megatron.test_launcher import LM_HOOKS, LM_SCRIPT, hooks_of


@pytest.fixture
def calls(monkeypatch):
    """No Megatron is needed to look at the functions."""
    seen = []
    monkeypatch.setattr(hooks, "show_refusals", lambda: None)
    monkeypatch.setattr(hooks, "install", lambda: seen.append("install"))
    monkeypatch.setattr(hooks, "check_installed", lambda: seen.append("check"))
    monkeypatch.setattr(hooks.calls, "check_provider", lambda: None)
    return seen


def base_provider(train_val_test_num_samples, vp_stage=None):
    """The script's."""
    return train_val_test_num_samples, vp_stage


def test_a_provider_keeps_its_looks(calls, monkeypatch):
    monkeypatch.setattr(base_provider, "is_distributed", True, raising=False)
    wrapped = megaresume.provider(base_provider)
    assert calls == ["install"]
    assert "vp_stage" in inspect.signature(wrapped).parameters and wrapped.is_distributed
    assert (wrapped.__name__, wrapped.__doc__) == ("base_provider", "The script's.")
    assert wrapped([1, 2, 3], vp_stage=1) == ([1, 2, 3], 1) and calls == ["install", "check"]
    # As Megatron does it for every chunk of a virtual pipeline.
    assert functools.partial(wrapped, vp_stage=2)([0]) == ([0], 2)


def test_a_partial_as_provider(calls):
    wrapped = megaresume.provider(functools.partial(base_provider, vp_stage=7))
    assert wrapped([1]) == ([1], 7) and not getattr(wrapped, "is_distributed", False)


def test_a_provider_that_a_copy_calls(calls, monkeypatch):
    """Without the launcher too: a fork's own build_train_valid_test_data_iterators calls it, past ours."""
    monkeypatch.undo()
    monkeypatch.setattr(hooks.calls, "process", hooks.calls._Process())  # or this process would end with status 1
    monkeypatch.setattr(hooks, "install", lambda: None)
    monkeypatch.setattr(hooks, "check_installed", lambda: None)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py"])
    wrapped = megaresume.provider(base_provider)
    with pytest.raises(SetupError, match="training begins") as error:
        wrapped([1, 2, 3])
    assert "build_train_valid_test_data_iterators" in error.value.expected
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--megaresume-mode", "off"])
    assert wrapped([1, 2, 3]) == ([1, 2, 3], None)


def test_no_provider_works_with_the_stream_alone(calls):
    wrapped = megaresume.provider()
    assert wrapped.is_distributed and "vp_stage" in inspect.signature(wrapped).parameters
    with pytest.raises(UsageError, match="no datasets") as error:
        wrapped([1, 2, 3])
    assert "--megaresume-data" in error.value.action


def test_flags_are_added_once(calls):
    def add_args(parser):
        parser.add_argument("--mine")
        return parser

    flags = megaresume.extra_args_provider(megaresume.extra_args_provider(add_args))
    parser = flags(argparse.ArgumentParser())
    args = parser.parse_args(["--mine", "1", "--megaresume-mode", "guard", "--megaresume_data", "x.yaml"])
    assert (args.mine, args.megaresume_mode, args.megaresume_data) == ("1", "guard", "x.yaml")
    assert megaresume.extra_args_provider()(parser) is parser
    assert megaresume.extra_args_provider(lambda parser: None)(parser) is parser  # it forgot to return it


EDITED = LM_SCRIPT.replace(
    "pretrain(train_valid_test_datasets_provider)",
    "pretrain(megaresume.provider(train_valid_test_datasets_provider),"
    " extra_args_provider=megaresume.extra_args_provider())",
)


@pytest.mark.process
@pytest.mark.parametrize("where", ["before", "after"])
def test_an_edited_script_without_the_launcher(tmp_path, where):
    """The hooks come when Megatron is imported already, and reach the names that others have imported from it."""
    assert EDITED != LM_SCRIPT
    text = f"import megaresume\n{DOUBLES}\n" + EDITED
    if where == "before":
        text = text.replace("seams.Factory.__call__ = around", "seams.Factory.__call__ = around\nmegaresume.provider()")
    # The doubles stand in the place of our hooks: off, or the provider would refuse to be called past them.
    done = run_python(script(write_lm(tmp_path) / "pretrain_gpt.py", text), "--megaresume-mode", "off")
    assert hooks_of(done.stdout) == LM_HOOKS, done.stderr
    assert done.stdout.endswith("built [1, 2, 3]\n") and done.returncode == 0


@pytest.mark.process
def test_an_edited_script_under_the_launcher(tmp_path):
    root = write_lm(tmp_path)
    text = f"import megaresume\n{DOUBLES}\n" + EDITED
    done = run_python("-m", "megaresume.run", script(root / "pretrain_gpt.py", text), "--megaresume-mode", "off")
    assert hooks_of(done.stdout) == LM_HOOKS, done.stderr


# Refusals without the launcher

WITH_A_HOOK = """
import sys
import megaresume
from megaresume.stream.errors import UsageError

def theirs(kind, error, trace):
    print(f"theirs: {kind.__name__}: {error}", file=sys.stderr)

sys.excepthook = theirs
megaresume.extra_args_provider()
megaresume.provider()
"""


@pytest.mark.process
def test_a_refusal_is_a_message(tmp_path):
    done = run_python(script(tmp_path / "own.py", WITH_A_HOOK + "raise UsageError('no such thing', action='--other')"))
    assert done.returncode == 1
    assert done.stderr.startswith("megaresume: error: no such thing") and "--other" in done.stderr
    assert "theirs" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.process
def test_other_errors_go_to_the_hook_that_was_there(tmp_path):
    done = run_python(script(tmp_path / "own.py", WITH_A_HOOK + "raise ValueError('of the script')"))
    assert (done.returncode, done.stderr) == (1, "theirs: ValueError: of the script\n")


@pytest.mark.process
def test_no_megatron_is_refused_without_a_traceback(tmp_path):
    root = write_lm(tmp_path)
    checkpointing = root / "megatron" / "training" / "checkpointing.py"
    checkpointing.write_text(checkpointing.read_text().replace("schedule_async_save", "renamed"))
    (root / "megatron" / "training" / "async_utils.py").write_text("def renamed(request):\n    pass")
    done = run_python(script(root / "pretrain_gpt.py", "import megaresume\n" + EDITED))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "megaresume: error: " in done.stderr and "has no schedule_async_save" in done.stderr


GROUP = (
    WITH_A_HOOK
    + """
import os, time
import torch.distributed as dist
from megaresume.checkpoint import ending
from megaresume.checkpoint.ranks import on_all_ranks

ending.END_PATIENCE = float(os.environ.get("PATIENCE", ending.END_PATIENCE))
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
dist.barrier()

def fail():
    raise UsageError("no such thing")

if sys.argv[1] == "all":
    on_all_ranks(fail)
elif sys.argv[1] == "alone":
    time.sleep(300) if rank == 0 else fail()
elif sys.argv[1] == "caught":
    try:
        on_all_ranks(fail)
    except UsageError:
        if rank == 1:
            raise
        time.sleep(300)
elif sys.argv[1] == "gone":
    try:
        on_all_ranks(fail)
    finally:
        if rank == 0:
            os._exit(0)
"""
)


@pytest.mark.process
@pytest.mark.parametrize(
    ("case", "who"), [("all", ""), ("alone", "rank 1: "), ("caught", "rank 1: "), ("gone", "rank 1: ")]
)
def test_ranks_refuse_once_and_end(tmp_path, case, who):
    """caught, gone: rank 0 never comes to say it; it goes on, or has ended."""
    pytest.importorskip("torch")
    own = str(script(tmp_path / "own.py", GROUP))
    env = {"PATIENCE": "1"} if case == "caught" else {}
    with LocalJob(own, [case], num_processes=2, output=tmp_path / "out", launcher="env", env=env) as job:
        status, output = job.wait(60), job.text()
    assert status == 1, output
    assert re.findall("megaresume: error: (.*)no such thing", output) == [who], output
    assert "Traceback" not in output and "theirs" not in output


def test_a_real_run_refuses_once(mini: Any, data_yaml: Path, tmp_path: Path) -> None:
    """An edited script of the stand-in, as the patch leaves it."""
    pytest.importorskip("megatron.core")
    text = (MINI / SCRIPTS[0]).read_text()
    edited = text.replace(
        "pretrain(\n        train_valid_test_datasets_provider,",
        "pretrain(\n        megaresume.provider(train_valid_test_datasets_provider),",
    ).replace("args_defaults=", "extra_args_provider=megaresume.extra_args_provider(), args_defaults=")
    assert edited.count("megaresume.") == 2
    path = script(tmp_path / "edited.py", f"import sys\nsys.path.insert(0, {str(MINI)!r})\nimport megaresume\n{edited}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("")
    words = ["--megaresume-data", data_yaml, "--seed", 7, "--seq-length", 32, "--vocab-size", 65]
    words += ["--train-iters", 4, "--micro-batch-size", 2, "--global-batch-size", 8, "--load", tmp_path / "run"]
    run = mini(*words, script=str(path), hooks=False)
    assert run.status == 1 and run.steps() == {}, run.output
    assert run.output.count("megaresume: error: ") == 1 and "there are pointers but no checkpoint" in run.output
    assert "Traceback" not in run.output
