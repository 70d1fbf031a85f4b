"""docs/first-run.md: the commands of the smoke test can be planned. Real runs: tests/cluster/smoke and launch."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from megaresume.cluster.launcher import KINDS
from megaresume.cluster.smoke import command as smoke
from megaresume.cluster.smoke.plan import make_plan
from tests.docs.pages import section

TEXT = section("first-run.md", "The smoke test")
COMMANDS = re.findall(r"^    (megaresume smoke.*)$", TEXT, flags=re.MULTILINE)


def planned(command: str):
    parser = argparse.ArgumentParser()
    smoke.add_arguments(parser)
    return make_plan(smoke.options(parser.parse_args(shlex.split(command)[2:])))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text('python train.py "$@"\n')
    (tmp_path / "data.yaml").write_text("sources: {}\n")
    plan = planned(command)
    assert plan.stops and len(plan.layouts) == len(plan.stops) + 1


def test_it_names_every_flag_and_kind() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    smoke.add_arguments(parser)
    flags = {word for action in parser._actions for word in action.option_strings}
    assert not {flag for flag in flags if f"{flag}" not in TEXT}
    assert all(f"| `{kind}` |" in TEXT for kind in KINDS)


def test_the_flags_that_a_script_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text('python train.py "$@"\n')
    plan = planned("megaresume smoke --script train.sh")
    given = plan.launch("run", plan.layouts[0], data=None, model=()).flags
    block = re.search(r"^    (--save OUT.*\n    --mega.*)$", TEXT, flags=re.MULTILINE)
    assert block is not None
    assert {w for w in given if w.startswith("--")} == {w for w in block[1].split() if w.startswith("--")}
