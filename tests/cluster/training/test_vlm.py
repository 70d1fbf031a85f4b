"""A blend of pictures and text: trained under DeepSpeed, killed, resumed on other processes and workers, compared with
its twin down to the pixels; the demo's pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaresume.batches.open import open_stream
from megaresume.cluster.demo.vlm import ENCODER, HELD_OUT, TRAIN, Pictures, digits_of, write_pictures
from megaresume.data.prepare.shards import prepare_shards
from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.stream.kernel import SOURCE
from tests.cluster.training.compare import compare
from tests.cluster.training.conftest import write_corpus
from tests.release import release

VISION = "--vision-num-layers 1 --vision-hidden-size 16 --vision-num-attention-heads 2 --vocab-size 258"
SIZES = f"--train-iters 6 --global-batch-size 8 --save-interval 2 {VISION}"
BLEND = """\
seed: 1234
seq_length: 128
packing: {mode: best_fit, open_bins: 8}
sources:
  digits: {kind: webdataset, index: small.shards.idx, weight: %s, augment: [{crop: {scale: [0.5, 1.0]}}, flip]}
  web: {path: web, weight: %s}
"""


@pytest.fixture(scope="module")
def blends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Data configs: pictures and text in equal parts, and nearly no pictures; few records, so that epochs end."""
    directory = tmp_path_factory.mktemp("pictures")
    small = Pictures(name="small", records=90, shards=2, held_out=False)
    prepare_shards(write_pictures(directory, small), directory / "small", ImageTextEncoder.from_options(ENCODER))
    write_corpus(directory / "web", documents=400, seed=1)
    for name, weight in (("even", 0.5), ("rare", 0.02)):
        (directory / f"{name}.yaml").write_text(BLEND % (weight, 1 - weight))
    return {name: f"--megaresume-data {directory / name}.yaml" for name in ("even", "rare")}


def test_killed_and_resumed_on_another_topology(runs: Any, blends: dict[str, str]) -> None:
    held_out = f"--megaresume-held-out {blends['even'].split()[1]} --megaresume-held-out-iters 1 --eval-interval 3"
    twin = runs("vlm-twin", f"{SIZES} --micro-batch-size 2 {held_out} --save {{dir}}/vlm-twin", data=blends["even"])
    assert twin.status == 0, twin.text[-4000:]
    flags = f"{SIZES} --save {{dir}}/vlm --load {{dir}}/vlm"
    runs("vlm", f"{flags} --micro-batch-size 4 --num-workers 1", kill_after=3, data=blends["even"])
    last = runs(
        "vlm",
        f"{flags} --micro-batch-size 2 --num-workers 2 --megaresume-start-method spawn",
        num_processes=1,
        data=blends["even"],
    )
    assert last.status == 0, last.text[-4000:]
    assert "| dp 2->1 workers 1->2 mbs 4->2 gbs 8->8 | repeated 0 skipped 0 |" in last.resumed
    assert compare(last.records, twin.records) is None
    for step, record in twin.records.steps.items():
        assert record["loss"] == pytest.approx(last.records.steps[step]["loss"], rel=1e-4), step
    # The untrained model, the middle and the end; the count of tokens is that of the data.
    measured = twin.records.held_out
    assert sorted(measured) == [0, 3, 6]
    assert len({record["tokens"] for record in measured.values()}) == 1
    answers = measured[6]["answers"]
    assert answers and all(len(answer["predicted"]) == len(answer["expected"]) for answer in answers)


RELEASE = release(
    "`[1]`, `[2]`: further ZeRO stages",
    "the same, `[3]`",
)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=RELEASE), pytest.param(2, marks=RELEASE), 3])
def test_micro_batches_without_a_picture_hang_no_collective(runs: Any, blends: dict[str, str], stage: int) -> None:
    """Two tokens in a hundred are of pictures: most micro-batches have none, and ranks differ in which."""
    stream = open_stream(blends["rare"].split()[1], split="9,1,0")
    seen = [bool((stream.plan(k, k + 1).table[:, SOURCE] == 0).any()) for k in range(4 * 8)]
    # Micro-batches are single samples, in turn of two ranks.
    assert sum(seen) < 8 and any(one != other for one, other in zip(seen[::2], seen[1::2], strict=True))
    flags = f"{SIZES} --micro-batch-size 1 --zero-stage {stage} --untie-embeddings-and-output-weights"
    flags += f" --train-iters 4 --save {{dir}}/rare{stage} --load {{dir}}/rare{stage}"
    runs(f"rare{stage}", flags, kill_after=3, data=blends["rare"])
    done = runs(f"rare{stage}", flags, data=blends["rare"])
    assert done.status == 0, done.text[-4000:]
    assert [record["step"] for record in done.records.starts] == [0, 2] and sorted(done.records.steps) == [1, 2, 3, 4]


def test_data_and_vision_must_fit(runs: Any, blends: dict[str, str]) -> None:
    flags = "--train-iters 1 --micro-batch-size 1 --vocab-size 258"
    blind = runs("blind", flags, num_processes=1, data=blends["even"])
    assert blind.status == 2 and "the model has no vision encoder" in blind.text and "Traceback" not in blind.text


def test_no_picture_for_training_holds_a_digit_that_is_held_out() -> None:
    from sklearn.datasets import load_digits

    images = load_digits().images
    assert len(np.unique(images.reshape(len(images), -1), axis=0)) == len(images)
    train, held_out = (set(digits_of(pictures, len(images)).tolist()) for pictures in (TRAIN, HELD_OUT))
    assert len(train) > 1300 and len(held_out) > 300 and not train & held_out
    assert train | held_out == set(range(len(images)))


def test_shards_are_the_same_bytes_every_time(tmp_path: Path) -> None:
    small = Pictures(name="small", records=20, shards=2, held_out=True)
    one, other = (write_pictures(tmp_path / name, small) for name in ("one", "other"))
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in other]
    assert json.dumps(ENCODER)
