"""docs/reliability.md: its table says that nothing was lost, its session comes out as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reliability.command import FLIP, SAVE
from tests.reliability.faults import FAULTS
from tests.reliability.session import masked

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reliability.md").read_text()


def rows() -> dict[str, list[int]]:
    """Fault -> tried, resumed exactly, refused correctly, lost."""
    found = re.findall(r"^\| (.+) \| ([0-9,]+) \| ([0-9,]+) \| ([0-9,]+) \| ([0-9,]+) \|$", TEXT, re.MULTILINE)
    return {name: [int(number.replace(",", "")) for number in numbers] for name, *numbers in found}


def test_the_table() -> None:
    counted = rows()
    assert set(FAULTS) <= counted.keys() and SAVE in counted and FLIP not in counted
    assert sum(tried for name, (tried, *_) in counted.items() if name.startswith("SIGKILL")) >= 3000
    for name, (tried, resumed, refused, lost) in counted.items():
        assert (resumed + refused, lost) == (tried, 0), name


@pytest.mark.process
def test_the_session_and_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.reliability", "--session"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    block = TEXT.split("<!-- session -->\n")[1].split("<!-- end -->")[0]
    shown = "".join(line.removeprefix("    ") for line in block.strip("\n").splitlines(keepends=True))
    assert masked(done.stdout).split() == masked(shown).split()
    (command,) = re.findall(r"^    python (-m tests\.reliability .*)$", TEXT, re.MULTILINE)
    parsed = subprocess.run(
        [sys.executable, *command.split(), "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert parsed.returncode == 0 and set(re.findall(r"--\w+", command)) <= set(re.findall(r"--\w+", parsed.stdout))
