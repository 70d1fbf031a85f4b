"""docs/verify.md: the commands of `trace`, and what it shows of their output."""

from __future__ import annotations

import functools
import re
import subprocess
import sys

import pytest

from megaresume.checkpoint.system import Topology
from tests.cli import conftest
from tests.cli.conftest import SavedRun
from tests.cli.conftest import run as run
from tests.docs.pages import section

TEXT = section("verify.md", "Which documents did a step train on?")


@pytest.fixture(autouse=True)
def layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks and micro-batches of the document."""
    monkeypatch.setattr(conftest, "Topology", functools.partial(Topology, micro_batch_size=2))


@pytest.mark.process
def test_the_commands(layout: None, run: SavedRun) -> None:
    commands = re.findall(r"^    megaresume (trace .*)$", TEXT, flags=re.MULTILINE)
    output = ""
    for command in commands:
        command = command.replace("checkpoints/", str(run.save))
        done = subprocess.run(
            ["bash", "-c", f"{sys.executable} -m megaresume {command}"], capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0 and done.stdout, (command, done.stderr)
        output += done.stdout
    assert len(commands) == 5
    shown = re.findall(r"^    ((?:#|step|web:|  epoch|    step).*)$", TEXT, flags=re.MULTILINE)
    assert len(shown) > 6
    for line in shown:
        assert line in output.splitlines(), line
