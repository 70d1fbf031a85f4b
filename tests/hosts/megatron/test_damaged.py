"""Files that only the load finds unreadable, in checkpoints whose checksums are not compared: all ranks go back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.megatron.conftest import Mini
from tests.release import release

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.process


RELEASE = release(
    "`[torch_dist-.metadata]`, `[torch-*/*.pt]`: another file of the checkpoint, another format",
    "the same, `[torch_dist-*.distcp]`",
)


@pytest.mark.parametrize(
    ("checkpoint_format", "pattern"),
    [
        ("torch_dist", "*.distcp"),
        pytest.param("torch_dist", ".metadata", marks=RELEASE),
        pytest.param("torch", "*/*.pt", marks=RELEASE),
    ],
)
def test_all_ranks_go_back_together(
    mini: Mini, data_yaml: Path, tmp_path: Path, checkpoint_format: str, pattern: str
) -> None:
    save = tmp_path / "save"
    flags = ["--megaresume-data", data_yaml, "--seed", 7, "--seq-length", 32, "--vocab-size", 65, "--save-interval", 2]
    flags += ["--micro-batch-size", 2, "--global-batch-size", 8, "--save", save, "--load", save]
    flags += ["--ckpt-format", checkpoint_format, "--no-megaresume-checksums"]
    first = mini(*flags, "--train-iters", 4)
    assert first.status == 0, first.output[-3000:]
    for path in (save / "iter_0000004").glob(pattern):
        path.write_bytes(b"none" + bytes(path.stat().st_size - 4))

    second = mini(*flags, "--train-iters", 4)
    assert second.status == 0, second.output[-3000:]
    assert second.output.count("megaresume: passed over iter_0000004: ") == 1
    assert "repeated 0 skipped 0 | step 2 from iter_0000002" in second.output
    assert second.steps() == {step: batch for step, batch in first.steps().items() if step > 2}
    third = mini(*flags, "--train-iters", 4)
    assert third.status == 0 and "step 4 from iter_0000004" in third.output, third.output[-3000:]
