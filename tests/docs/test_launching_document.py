"""docs/launching.md and launch/README.md say what the scripts say, and name the settings that they have.

Their commands run in tests/cluster/launch.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megaresume.cluster.drivers
from megaresume.shipped import launch_dir, launch_script

DOCUMENT = Path(__file__).parents[2] / "docs" / "launching.md"
SCRIPTS = ("torchrun.sh", "deepspeed.sh", "slurm/train.sbatch")
DRIVER = Path(megaresume.cluster.drivers.__file__).parent


def settings(script: str) -> set[str]:
    """Those in the block at its top."""
    text = launch_script(script).read_text()
    block = text[text.index("# ==== settings") : text.index("# ==== nothing below needs editing")]
    return set(re.findall(r"^([A-Z]\w+)=", block, re.MULTILINE))


def test_every_decision_in_the_table_is_one_of_the_driver() -> None:
    rows = re.findall(r"^\| `(.+?)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) >= 14
    driver = "".join(path.read_text() for path in DRIVER.glob("*.py"))
    # What changes from job to job has variables in the driver: the words around them are compared.
    words = r"…|\b\d+\b|\bn2\b|n\[1-2\]|/data/web|\bUSR1\b|\bTERM\b|ValueError|status|preemption|[:,();]"
    changing = rf"[:,(); ]*(?:{words})[:,(); ]*"
    for row in rows:
        for words in re.split(changing, row):
            assert len(words) < 4 or words in driver, f"{words!r} of {row!r}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_readme_has_every_setting(script: str) -> None:
    readme = (launch_dir() / "README.md").read_text()
    assert settings(script) <= set(re.findall(r"`([A-Z][A-Z_]+)`", readme))


def test_the_readme_has_no_other_settings() -> None:
    table = (launch_dir() / "README.md").read_text().split("## Settings")[1].split("## What is in")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \| ", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set.union(*map(settings, SCRIPTS))
