"""docs/launching.md and launch/README.md say what the scripts say, and name the settings that they have.

Their commands run in tests/launch.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megaresume.smoke.scripts import launch_dir, launch_script

DOCUMENT = Path(__file__).parents[2] / "docs" / "launching.md"
SCRIPTS = ("torchrun.sh", "deepspeed.sh", "slurm/train.sbatch", "slurm/train-deepspeed.sbatch")


def settings(script: str) -> set[str]:
    """Those in the block at its top."""
    text = launch_script(script).read_text()
    block = text[text.index("# ==== settings") : text.index("# ==== nothing below needs editing")]
    return set(re.findall(r"^([A-Z]\w+)=", block, re.MULTILINE))


def test_every_decision_in_the_table_is_one_of_the_script() -> None:
    rows = re.findall(r"^\| `(.+?)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) >= 14
    script = re.sub(r"\$\{\w+:[-+](.*?)\}", r"\1", launch_script("slurm/train.sbatch").read_text())
    # What changes from job to job has variables in the script: the words around them are compared.
    for row in rows:
        for words in re.split(
            r"[:,(] |…|\d+|\bDUE TO TIME LIMIT\b|DUE TO NODE FAILURE|\)|\bUSR1\b|, new checkpoint: yes|;", row
        ):
            words = words.strip(" :,(")
            if len(words) > 3 and not re.search(r"n\[", words):
                assert words in script, f"{words!r} of {row!r}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_readme_has_every_setting(script: str) -> None:
    readme = (launch_dir() / "README.md").read_text()
    assert settings(script) <= set(re.findall(r"`([A-Z][A-Z_]+)`", readme))


def test_the_readme_has_no_other_settings() -> None:
    table = (launch_dir() / "README.md").read_text().split("## Settings")[1].split("## What is in")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \| ", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set.union(*map(settings, SCRIPTS))
