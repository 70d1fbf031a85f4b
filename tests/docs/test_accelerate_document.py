"""docs/accelerate.md: its program, killed and started again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megaresume.checkpoint.choose import choose
from tests.docs.test_torch_document import run
from tests.release import release

pytest.importorskip("accelerate")
pytestmark = pytest.mark.process

DOCUMENT = Path(__file__).parents[2] / "docs" / "accelerate.md"


@release(
    "three launches",
    "`tests/hosts/hugging_face/test_accelerator.py::test_two_ranks_to_one`",
)
def test_the_program_of_the_document_resumes_bit_for_bit(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    program.write_text(block)
    nothing, *whole = run(program, "whole")
    assert nothing.startswith("megaresume: nothing is loaded: no checkpoint in ")
    assert [line.split()[1] for line in whole] == [str(step) for step in range(1, 76)]
    run(program, "cut", kill_at=33)
    choice = choose(tmp_path / "cut" / "checkpoints")
    assert choice is not None and choice.iteration is not None
    resumed = run(program, "cut")
    (said,) = [line for line in resumed if "resumed at" in line]
    assert f"resumed at sample {4 * choice.iteration}" in said and "random state restored" in said
    assert [line for line in resumed if line.startswith("step")] == whole[choice.iteration :]
    kept = sorted(path.name for path in (tmp_path / "cut" / "checkpoints").glob("checkpoint-*"))
    assert kept == ["checkpoint-65", "checkpoint-70", "checkpoint-75"]
