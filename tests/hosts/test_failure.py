"""A rank that cannot read its samples ends, and the others do not wait for it for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.release import release

RELEASE = release(
    "`[1]`: with a worker process",
    "the same, `[0]`",
)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=RELEASE)])
def test_a_damaged_document_ends_the_whole_job(launch: Any, tmp_path: Path, num_workers: int) -> None:
    status, output = launch(str(Path(__file__).parent / "failing.py"), "-", tmp_path, num_workers, launcher="torchrun")
    assert status != 0
    assert "document 37 is damaged" in output
    assert "it was not noticed" not in output
