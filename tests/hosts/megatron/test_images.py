"""A blend of shards and text under Megatron's loop: whole batches with pixels, the same after a kill on other ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
import stream_kit as kit

from megaresume.data.prepare.shards import prepare_shards
from megaresume.hosts.megatron.provider import form_of
from megaresume.program import main
from megaresume.stream.data_yaml import PackingConfig
from megaresume.stream.errors import UsageError
from tests.data.kit import encoder, write_shards


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Of a run on captioned pictures, augmented, and text; in samples of 64 tokens."""
    directory = tmp_path_factory.mktemp("images")
    write_shards(directory / "shards", [30, 20])
    prepare_shards([directory / "shards/pairs-{000000..000001}.tar"], directory / "pairs", encoder())
    kit.write_corpus(directory / "text", [[token % 250 for token in d] for d in kit.documents(1, 200)])
    sources = {
        "pairs": {"kind": "webdataset", "index": "pairs.shards.idx", "weight": 0.7, "augment": [{"flip": 0.5}]},
        "text": {"path": "text", "weight": 0.3},
    }
    data = directory / "data.yaml"
    data.write_text(yaml.safe_dump({"seed": 7, "seq_length": 64, "sources": sources}))
    words = ["--megaresume-data", data, "--seed", 7, "--seq-length", 64, "--vocab-size", 512, "--eval-iters", 0]
    return [*words, "--global-batch-size", 8, "--dataloader-type", "external"]


@pytest.fixture(scope="module")
def uninterrupted(mini: Any, flags: list[object]) -> Iterator[dict[int, list[str]]]:
    run = mini(*flags, "--train-iters", 8, "--micro-batch-size", 2)
    assert run.status == 0, run.output[-3000:]
    return run.steps()


def test_killed_and_resumed_on_other_ranks(
    mini: Any, tmp_path: Path, flags: list[object], uninterrupted: dict[int, list[str]]
) -> None:
    where = ["--save", tmp_path / "save", "--load", tmp_path / "save", "--save-interval", 3, "--ckpt-format", "torch"]
    steps = ["--train-iters", 8]
    log = tmp_path / "log"
    first = mini(
        *(*flags, *where, *steps, "--micro-batch-size", 2, "--megaresume-log-samples", log),
        env={"MINI_KILL": "step:5"},
    )
    assert first.status == -9, first.output[-3000:]
    second = mini(
        *(*flags, *where, *steps, "--micro-batch-size", 4, "--num-workers", 2, "--megaresume-log-samples", log),
        num_processes=1,
    )
    assert second.status == 0, second.output[-3000:]
    assert "resumed at sample 24" in second.output
    assert second.steps() == {step: uninterrupted[step] for step in range(4, 9)}
    for step, samples in first.steps().items():
        assert samples == uninterrupted[step]
    assert len({sample for samples in uninterrupted.values() for sample in samples}) > 50
    assert main(["verify", str(tmp_path / "save"), "--log-samples", str(log), "--content"]) == 0


def test_another_loader_is_refused_with_the_way_out(mini: Any, flags: list[object]) -> None:
    run = mini(*flags[:-1], "single", "--train-iters", 2, "--micro-batch-size", 2)
    assert run.status not in (0, -9) and "Traceback" not in run.output
    assert "pass --dataloader-type external" in run.output
    assert not run.rows()


def test_megatron_deepspeed_takes_no_images() -> None:
    with pytest.raises(UsageError, match="take no images"):
        form_of(kit.arguments(), PackingConfig(mode="knapsack"), text=True, eod=lambda: 0, images=True)
