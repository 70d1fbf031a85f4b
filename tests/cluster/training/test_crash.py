"""A fault that nobody foresaw is seen: its traceback reaches the terminal, and the process ends with status 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


class Breaks:
    """A source of one's own whose documents cannot be read."""

    def __len__(self) -> int:
        return 50

    def length(self, i: int) -> int:
        return 40

    def get(self, i: int) -> np.ndarray:
        raise RuntimeError("a disk that burns")


def test_a_traceback_is_not_lost(runs: Any, tmp_path: Path) -> None:
    config = tmp_path / "data.yaml"
    config.write_text(
        "seed: 1\nseq_length: 64\npacking: best_fit\n"
        "sources:\n  burning: {kind: python, factory: 'tests.cluster.training.test_crash:Breaks'}\n"
    )
    ended = runs("crash", "--train-iters 1 --micro-batch-size 1", num_processes=1, data=f"--megaresume-data {config}")
    assert ended.status == 1
    assert "Traceback" in ended.text and "RuntimeError: a disk that burns" in ended.text
