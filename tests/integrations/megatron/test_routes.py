"""`provider` and `extra_args_provider` in scripts that are edited: before or after the imports, with the hooks in."""

from __future__ import annotations

import argparse
import functools
import inspect

import pytest

import megaresume
from megaresume.integrations.megatron import hooks
from megaresume.stream.errors import UsageError
from tests.integrations.megatron.layouts import DOUBLES, run_python, script, write_lm
from tests.integrations.megatron.test_launcher import LM_HOOKS, LM_SCRIPT, hooks_of


@pytest.fixture
def calls(monkeypatch):
    """No Megatron is needed to look at the functions."""
    seen = []
    monkeypatch.setattr(hooks, "install", lambda: seen.append("install"))
    monkeypatch.setattr(hooks, "check_installed", lambda: seen.append("check"))
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


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_edited_script_without_the_launcher(tmp_path, where):
    """The hooks come when Megatron is imported already, and reach the names that others have imported from it."""
    assert EDITED != LM_SCRIPT
    text = f"import megaresume\n{DOUBLES}\n" + EDITED
    if where == "before":
        text = text.replace("seams.Factory.__call__ = around", "seams.Factory.__call__ = around\nmegaresume.provider()")
    done = run_python(script(write_lm(tmp_path) / "pretrain_gpt.py", text))
    assert hooks_of(done.stdout) == LM_HOOKS, done.stderr
    assert done.stdout.endswith("built [1, 2, 3]\n") and done.returncode == 0


def test_an_edited_script_under_the_launcher(tmp_path):
    root = write_lm(tmp_path)
    text = f"import megaresume\n{DOUBLES}\n" + EDITED
    done = run_python("-m", "megaresume.run", script(root / "pretrain_gpt.py", text))
    assert hooks_of(done.stdout) == LM_HOOKS, done.stderr
