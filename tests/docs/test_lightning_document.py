"""docs/lightning.md: its program, killed and started again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megaresume.checkpoint.choose import choose
from tests.docs.test_torch_document import run
from tests.release import release

pytest.importorskip("lightning")

DOCUMENT = Path(__file__).parents[2] / "docs" / "lightning.md"


@release(
    "three starts, each of which imports Lightning",
    "`tests/hosts/lightning/test_lightning.py::test_losses_and_counters_are_those_of_a_run_that_nobody_stopped`",
)
def test_the_program_of_the_document_resumes_bit_for_bit(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    program.write_text(block)
    whole = [line for line in run(program, "whole") if line.startswith("step")]
    assert [line.split()[1] for line in whole] == [str(step) for step in range(1, 76)]
    run(program, "cut", kill_at=33)
    choice = choose(tmp_path / "cut" / "run")
    assert choice is not None and choice.iteration is not None
    resumed = run(program, "cut")
    (said,) = [line for line in resumed if "resumed at" in line]
    assert f"resumed at sample {4 * choice.iteration}" in said and "random state restored" in said
    assert [line for line in resumed if line.startswith("step")] == whole[choice.iteration :]
    kept = sorted(path.name for path in (tmp_path / "cut" / "run").glob("global_step*"))
    assert kept == ["global_step65", "global_step70", "global_step75"]
