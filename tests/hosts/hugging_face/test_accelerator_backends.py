"""Loops with Accelerate over DeepSpeed (ZeRO 1 to 3) and FSDP2: two ranks on gloo, killed in a save, and resumed.

What a loop trained it writes down itself: `accelerated.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.release import release

pytest.importorskip("accelerate")

from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.program import main
from megaresume.stream.errors import CheckpointError
from tests.hosts.hugging_face.accelerated import run
from tests.hosts.torch.record import items, launch, launch_forked, trained

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("accelerated.py")


RELEASE = release(
    "`[zero1]`, `[zero2]`, `[zero3]`, `[fsdp-full]`: three launches each",
    "the same, `[fsdp-sharded]`, and `tests/hosts/hugging_face/test_backends.py::test_killed_in_a_save`: `[zero2]`",
)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("zero1", marks=RELEASE),
        pytest.param("zero2", marks=RELEASE),
        pytest.param("zero3", marks=RELEASE),
        pytest.param("fsdp-full", marks=RELEASE),
        pytest.param("fsdp-sharded"),
    ],
)
def test_killed_in_a_save(tmp_path: Path, backend: str) -> None:
    run(tmp_path / "whole", epochs=2, save_every=50)
    order = items(trained(tmp_path / "whole"))
    directory = tmp_path / "run"
    options = {"batch": 2, "save_every": 8, "backend": backend}
    done = launch(PROGRAM, directory, 2, restarts=1, kill=("save", 24), epochs=2, **options)
    assert done.returncode == 0 and "exitcode: -9" in done.stderr, done.stderr[-5000:]
    assert "repeated 0 skipped 0 | step 16 from checkpoint-16 | random state restored" in done.stdout
    steps = trained(directory)
    assert items(steps) == order
    assert [len(step) for step in steps] == [8] * 25
    root = directory / "checkpoints"
    newest = choose(root, checksums=True)
    assert newest is not None and (newest.tag, newest.rejected) == ("checkpoint-25", ())
    entries = read_ledger(ledger_path(root)).entries
    assert [(e.iteration, e.samples) for e in entries if e.kind == "finished"] == [(25, 200)]
    assert main(["verify", str(root)]) == 0
    other_layouts(directory, backend)


def other_layouts(directory: Path, backend: str) -> None:
    """Another back-end is refused; so is another number of ranks, by ZeRO."""
    status, said = launch_forked(PROGRAM, directory, 1, attempt=3, epochs=3, backend=backend, on_change="stage")
    name = "FSDP" if backend.startswith("fsdp") else "DeepSpeed"
    if name == "DeepSpeed":
        assert status == 1, said[-5000:]
        assert "DeepSpeed cannot load ZeRO optimizer state on a different number of ranks" in said
        assert "on 2 ranks; 1 now" in said
    else:
        assert status == 0, said[-5000:]
        assert "resumed at sample 200" in said and "dp 2->1" in said
        assert sorted(items(trained(directory))[200:]) == list(range(100))
    with pytest.raises(CheckpointError, match=rf"not written with DDP(.|\n)*written with {name}"):
        run(directory, attempt=4, epochs=4)
