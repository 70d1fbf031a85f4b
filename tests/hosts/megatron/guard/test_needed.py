"""A run that goes on with smaller global batches has trained more than Megatron reckons, and must not run dry."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaresume.data.spans import spans_path
from megaresume.hosts.megatron.guard.pinned import needed_sizes, refuse_spans
from megaresume.hosts.megatron.guard.record import Request
from megaresume.stream.errors import ConfigError
from tests.corpora import write_spans
from tests.hosts.megatron.guard.conftest import Corpora, Run

BLEND: dict[str, Any] = {"weights": [0.6, 0.3, 0.1]}
#: 30 steps of 8 samples, evaluated 3 times on 2 global batches, then 60 steps of 4 more.
SMALLER = {
    "iteration": 30,
    "train_iters": 90,
    "global_batch_size": 4,
    "eval_interval": 10,
    "eval_iters": 2,
    "consumed_valid_samples": 48,
}
#: what Megatron asks for then: 90 * 4, (90 // 10 + 1) * 2 * 4, 2 * 4.
ASKED = [360, 80, 8]


def arguments(**changed: Any) -> SimpleNamespace:
    values: dict[str, Any] = {"consumed_train_samples": 240, **SMALLER, **changed}
    return SimpleNamespace(**values)


@pytest.mark.parametrize("paths", [1, 3], ids=["single", "blend"])
def test_smaller_global_batches_from_here_on(build: Run, corpora: Corpora, paths: int) -> None:
    spec: dict[str, Any] = {"paths": corpora.paths[:paths], **(BLEND if paths > 1 else {})}
    base = build(**spec, sizes=[300, 80, 16])
    again = build(**spec, sizes=ASKED, loaded=base["payload"], samples=240, args=SMALLER)
    assert len(again["train"]) >= 240 + 60 * 4
    assert len(again["valid"]) >= 48 + (80 - 3 * 2 * 4)
    for split in ("train", "valid", "test"):
        assert again[split][: len(base[split])] == base[split], split


@pytest.mark.parametrize("chunks", [1, 2])
def test_an_adoption_builds_what_stock_builds(build: Run, corpora: Corpora, chunks: int) -> None:
    stock = build(paths=corpora.paths, **BLEND, sizes=ASKED, guard=False)
    adopted = build(paths=corpora.paths, **BLEND, sizes=ASKED, samples=240, args=SMALLER, chunks=chunks)
    assert [adopted[s] for s in ("train", "valid", "test")] == [stock[s] for s in ("train", "valid", "test")]
    assert adopted["chunks"] == [stock["train"]] * chunks


def test_conversations_are_no_corpora_of_megatrons_datasets(corpora: Corpora, tmp_path: Path) -> None:
    chat = tmp_path / "chat"
    write_spans(chat, [3], [[(1, 2)]])
    blend = ([str(corpora.paths[0]), str(chat)], None)
    request = Request(
        cls=object, settings={}, blend=None, blend_per_split=(blend, None, None), sizes=(8, 0, 0), shares=(None,) * 3
    )
    with pytest.raises(ConfigError, match=r"train every token of conversations[\s\S]*chat.spans"):
        refuse_spans(request)
    spans_path(chat).unlink()
    refuse_spans(request)


def test_sizes() -> None:
    assert needed_sizes(arguments(), None, ASKED) == (480, 104, 8)
    assert needed_sizes(arguments(), None, [360, None, 0]) == (480, None, 0)
    unchanged = arguments(consumed_train_samples=120, consumed_valid_samples=24)
    assert needed_sizes(unchanged, None, ASKED) == (360, 80, 8)
    larger = arguments(consumed_train_samples=60, consumed_valid_samples=12)
    assert needed_sizes(larger, None, ASKED) == (360, 80, 8), "what Megatron asks for is enough"
    over = arguments(iteration=90, consumed_train_samples=360, consumed_valid_samples=72)
    assert needed_sizes(over, None, ASKED)[0] == 361, "Megatron's sampler asserts that a sample is left"
    assert needed_sizes(arguments(dataloader_type="cyclic"), None, ASKED) == (360, 80, 8)
    assert needed_sizes(arguments(skip_train=True), None, ASKED) == (360, 80, 8)


def test_by_samples() -> None:
    """--train-samples alone: that number. Where iterations were derived from it, Megatron counts those."""
    assert needed_sizes(arguments(train_iters=None, train_samples=360), None, ASKED)[0] == 360
    assert needed_sizes(arguments(train_samples=360), None, ASKED)[0] == 480
    ramp = {"rampup_batch_size": [2, 2, 40], "train_samples": 360, "train_iters": 100}
    assert needed_sizes(arguments(iteration=1, consumed_train_samples=2, **ramp), None, ASKED)[0] == 360


def test_a_run_goes_on_to_its_end(mini: Any, corpora: Corpora, tmp_path: Path) -> None:
    def flags(size: int, iterations: int) -> list[object]:
        blend = ["--data-path", 0.6, corpora.path("a"), 0.4, corpora.path("b")]  # exactly as long as it is asked for
        data = [*blend, "--split", "80,10,10", "--data-cache-path", tmp_path / "cache"]
        data += ["--save", tmp_path / "save", "--load", tmp_path / "save", "--ckpt-format", "torch"]
        sizes = ["--micro-batch-size", 1, "--global-batch-size", size, "--train-iters", iterations]
        return [*data, *sizes, "--seed", 7, "--seq-length", 1024, "--vocab-size", 1000, "--save-interval", 3]

    first = mini(*flags(4, 6), num_processes=1)
    assert first.status == 0, first.output
    second = mini(*flags(2, 9), num_processes=1)
    assert second.status == 0, second.output
    assert sorted(second.steps()) == list(range(7, 10))
    over = mini(*flags(2, 9), num_processes=1)
    assert over.status == 0, over.output
    assert not over.steps(), "a finished run that is started again trains nothing"
