"""The line of a resume claims nothing about an order that was changed on purpose."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megaresume.hosts.megatron.guard.compare import Difference
from megaresume.hosts.megatron.guard.order import Pass
from tests.hosts.megatron.guard.conftest import Corpora


def test_the_line_after_an_accepted_change(mini: Any, corpora: Corpora, tmp_path: Path) -> None:
    def run(weight: float, iterations: int, *more: object) -> str:
        data = ["--data-path", weight, corpora.path("a"), 0.4, corpora.path("b"), "--split", "80,10,10"]
        data += ["--data-cache-path", tmp_path / "cache", "--seed", 7, "--seq-length", 32, "--vocab-size", 1000]
        sizes = ["--micro-batch-size", 2, "--global-batch-size", 8, "--train-iters", 9, "--save-interval", 3]
        places = ["--save", tmp_path / "save", "--load", tmp_path / "save", "--ckpt-format", "torch"]
        done = mini(*data, *sizes, *places, "--exit-interval", iterations, *more, num_processes=1)
        assert done.status == 0, done.output
        return str(done.output)

    said = run(0.6, 3, "--no-save-rng")
    assert "--no-save-rng: the checkpoints of this run hold no random state" in said
    assert "Megatron resumes from them only with --no-load-rng" in said
    accept = ("--megaresume-accept", "data-path@24")
    changed = run(0.7, 6, *accept)
    assert "| repeated unknown skipped unknown (order changed: data-path@24) | step 3 from iter_0000003" in changed
    assert "repeated 0" not in changed and "random state NOT restored (--no-save-rng)" in changed
    # The flag stays in the launch script; the new order is the recorded one now.
    again = run(0.7, 9, *accept, "--no-load-rng")
    assert "| repeated 0 skipped 0 | step 6 from iter_0000006 | random state NOT restored (--no-load-rng)" in again


def test_only_changes_of_the_training_set_count() -> None:
    """Each name once: two corpora that changed are one `data-path`."""
    guard = Pass(SimpleNamespace(args=SimpleNamespace(consumed_train_samples=24), settings=None), None)  # type: ignore[arg-type]
    for name, split in (("valid-order", 1), ("data-path", 0), ("data-path", None), ("seed", None)):
        guard.accept(Difference(name=name, recorded="old", found="new", restore="", split=split))
    assert guard.changed == ("data-path@24", "seed@24")
    assert guard.accepted[0] == "sample 24: valid-order: old -> new" and len(guard.accepted) == 4
