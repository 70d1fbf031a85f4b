"""docs/before-a-launch.md: the commands of `plan`, run as they stand there, and what they print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import SavedRun, run  # noqa: F401  a fixture
from tests.docs.pages import section

TEXT = section("before-a-launch.md", "Plan a resume")
#: a command, and what it prints, each indented, with an empty line between.
SHOWN = re.compile(r"^    megaresume (.*)\n((?:\n(?:    (?!megaresume ).*\n)+)?)", flags=re.MULTILINE)


@pytest.fixture
def directory(run: SavedRun) -> Path:  # noqa: F811
    """What the document speaks of: checkpoints/ beside data.yaml and new.yaml."""
    run.save.rename(run.save.with_name("checkpoints"))
    run.data.with_name("new.yaml").write_text(run.data.read_text().replace("0.7", "0.2"))
    return run.save.parent


@pytest.mark.process
def test_the_commands(directory: Path) -> None:
    commands = SHOWN.findall(TEXT)
    assert len(commands) == TEXT.count("\n    megaresume plan ") == 7
    assert sum(bool(output.strip()) for _, output in commands) == 6
    program = f"{sys.executable} -m megaresume"
    for command, output in commands:
        done = subprocess.run(
            f"{program} {command}", shell=True, cwd=directory, capture_output=True, text=True, timeout=120
        )
        assert not done.stderr, done.stderr
        printed = [line.strip() for line in done.stdout.splitlines()]
        for line in output.split("\n"):
            assert line.strip() in [*printed, ""], f"{command}: {line.strip()!r} is not in\n{done.stdout}"
        if output.strip().startswith(("OK", "REFUSED")):
            assert printed[0] == output.strip().split("\n")[0]
            assert done.returncode == output.strip().startswith("REFUSED")
    assert (directory / "plan.json").stat().st_size > 100


@pytest.mark.process
def test_every_flag_is_explained() -> None:
    done = subprocess.run([sys.executable, "-m", "megaresume", "plan", "--help"], capture_output=True, text=True)
    flags = re.findall(r"^  (--[a-z][a-z-]+)", done.stdout, flags=re.MULTILINE)
    assert len(flags) > 12
    for flag in flags:
        assert f"`{flag}" in TEXT, flag
