"""The vision encoder, what it does to a GPTModel, and what of an image enters the digest of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megaresume.cluster.training.launch import Arguments, parse_arguments
from megaresume.cluster.training.logging import content_hashes
from megaresume.cluster.training.model import build_model, document_mask
from megaresume.cluster.training.vision import (
    Images,
    VisionLanguageModel,
    image_encoder,
    vision_shape,
    with_vision,
)
from megaresume.encoding.images.processors import processor_from_options
from megaresume.stream.errors import SetupError, UsageError

pytestmark = pytest.mark.usefixtures("groups")

CPU = torch.device("cpu")
BASE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 2 --megaresume-data d.yaml --lr 0.01"
VISION = "--vision-num-layers 2 --vision-hidden-size 16 --vision-num-attention-heads 2 --vision-patch-size 4"
NATIVE = {"kind": "native", "patch_size": 4, "temporal_patch_size": 1, "merge": 2, "min_pixels": 64}
SQUARES = {"kind": "patches", "size": 16, "patch_size": 4, "merge": 2, "fit": "stretch"}


def arguments(more: str = VISION) -> Arguments:
    return parse_arguments(f"{BASE} --train-iters 1 {more}".split())


class Encoder:
    """As much of an encoder as the model asks for."""

    def __init__(self, options: Any) -> None:
        self.processor = processor_from_options(options)


def model_for(options: Any, more: str = VISION) -> VisionLanguageModel:
    language = build_model(arguments(more), vocab_size=50, seq_length=16, device=CPU)
    return with_vision(arguments(more), language, Encoder(options), CPU)


def noise(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def batch_of(options: Any, images: list[tuple[Image.Image, int, int]]) -> dict[str, Any]:
    """Two rows of 16 tokens, each of two documents of 8; images (image, row, column)."""
    processor = processor_from_options(options)
    made = [processor(image, np.random.default_rng(0)) for image, _, _ in images]
    shape = (0, *processor.pixel_shape)
    tokens = torch.arange(32).view(2, 16) % 50
    places = [
        (row, column, processor.tokens_of(*output)) for (_, row, column), output in zip(images, made, strict=True)
    ]
    labels = (tokens + 1) % 50
    for row, column, num in places:
        tokens[row, column : column + num] = 49
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": torch.ones(2, 16),
        "position_ids": torch.arange(8).repeat(2, 2),
        "pixel_values": torch.from_numpy(np.concatenate([np.zeros(shape, np.float32), *(p for p, _ in made)])),
        "image_grid_thw": torch.tensor([grid for _, grid in made], dtype=torch.int64).view(-1, 3),
        "image_positions": torch.tensor(places, dtype=torch.int64).view(-1, 3),
        "num_tiles": torch.tensor([len(p) for p, _ in made], dtype=torch.int32),
    }


def losses(model: VisionLanguageModel, batch: Any) -> torch.Tensor:
    positions = batch["position_ids"]
    images = Images.of(batch, CPU)
    return model(batch["tokens"], positions, document_mask(positions), labels=batch["labels"], images=images)


def test_an_image_is_felt_behind_it_in_its_document_alone() -> None:
    model = model_for(NATIVE)
    one = losses(model, batch_of(NATIVE, [(noise(16, 16, 1), 0, 2), (noise(16, 8, 2), 1, 9)]))
    other = losses(model, batch_of(NATIVE, [(noise(16, 16, 3), 0, 2), (noise(16, 8, 2), 1, 9)]))
    assert torch.equal(one[1], other[1])
    assert torch.equal(one[0, :2], other[0, :2]) and torch.equal(one[0, 8:], other[0, 8:])
    assert (one[0, 2:8] != other[0, 2:8]).all()


def test_an_image_has_the_features_that_it_has_alone() -> None:
    model = model_for(NATIVE)
    images = [(noise(32, 8, 1), 0, 0), (noise(16, 16, 2), 0, 8), (noise(8, 8, 3), 1, 0)]
    patches = batch_of(NATIVE, images)
    grids = [(rows, columns) for _, rows, columns in patches["image_grid_thw"].tolist()]
    together = model.vision(patches["pixel_values"], grids)
    parts = torch.split(patches["pixel_values"], patches["num_tiles"].tolist())
    alone = torch.cat([model.vision(part, [grid]) for part, grid in zip(parts, grids, strict=True)])
    assert together.shape == (4 + 4 + 1, 32)
    torch.testing.assert_close(together, alone)


def test_a_tile_is_the_image_of_as_many_patches() -> None:
    """Both ways of cutting an image put the same pixels at the same places."""
    images = [(noise(16, 16, 1), 0, 1), (noise(16, 16, 2), 1, 8)]
    native = NATIVE | {"normalize": "none"}
    squares = SQUARES | {"normalize": "none"}
    torch.testing.assert_close(
        losses(model_for(native), batch_of(native, images)), losses(model_for(squares), batch_of(squares, images))
    )


@pytest.mark.parametrize(
    ("options", "size", "tokens"),
    [
        (NATIVE, (24, 16), 6),
        (SQUARES, (24, 16), 4),
        ({"kind": "tiles", "tile_size": 8, "patch_size": 4, "merge": 2, "max_tiles": 4}, (24, 8), 4),
    ],
    ids=["native", "patches", "tiles"],
)
def test_every_kind_of_processor_has_its_tokens(options: Any, size: tuple[int, int], tokens: int) -> None:
    """As many features as the batch has places for, each felt behind it."""
    batch = batch_of(options, [(noise(*size, 1), 1, 8)])
    assert batch["image_positions"].tolist() == [[1, 8, tokens]]
    model = model_for(options)
    plain = losses(model, batch)
    darker = losses(model, batch | {"pixel_values": batch["pixel_values"] - 1})
    assert torch.equal(plain[0], darker[0]) and (plain[1, 8:] != darker[1, 8:]).all()


def test_places_matter() -> None:
    """Two patches exchanged are another image."""
    model = model_for(NATIVE)
    batch = batch_of(NATIVE, [(noise(16, 16, 1), 0, 2)])
    exchanged = batch | {"pixel_values": batch["pixel_values"][[1, 0, *range(2, 16)]]}
    assert (losses(model, batch)[0, 2:8] != losses(model, exchanged)[0, 2:8]).all()


def test_without_an_image_the_language_model_is_itself_and_vision_has_gradients() -> None:
    model = model_for(NATIVE)
    batch = batch_of(NATIVE, [])
    positions = batch["position_ids"]
    mine = losses(model, batch)
    mine.sum().backward()
    assert torch.equal(
        mine, model.language(batch["tokens"], positions, document_mask(positions), labels=batch["labels"])
    )
    assert all(p.grad is not None and not p.grad.any() for p in model.vision.parameters())


def test_weights_follow_from_the_seed() -> None:
    one = model_for(NATIVE)
    torch.rand(7)
    other, third = model_for(NATIVE), model_for(NATIVE, f"{VISION} --seed 5")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one.vision.patches.weight, third.vision.patches.weight)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SetupError, match="--vision-patch-size 5"):
        vision_shape(processor_from_options(SQUARES), 5)
    with pytest.raises(SetupError, match="class tokens"):
        vision_shape(processor_from_options(SQUARES | {"class_tokens": 1}), 4)
    text, pictures = object(), type("Source", (), {"encoder": Encoder(NATIVE)})()
    with pytest.raises(UsageError, match="no vision encoder"):
        image_encoder(arguments(""), [text, pictures])
    with pytest.raises(UsageError, match="no images"):
        image_encoder(arguments(), [text])
    with pytest.raises(UsageError, match="--vision-hidden-size and no --vision-num-attention-heads"):
        arguments("--vision-num-layers 2")
    with pytest.raises(UsageError, match="such as 24"):
        arguments("--vision-num-layers 2 --vision-hidden-size 20 --vision-num-attention-heads 8")


def test_the_digest_of_a_sample_has_its_pixels_and_not_its_row() -> None:
    images = [(noise(16, 16, 1), 0, 2), (noise(8, 8, 2), 0, 9), (noise(16, 8, 3), 1, 1)]
    batch = batch_of(NATIVE, images)
    first, second = content_hashes(batch)
    # The same samples in another micro-batch.
    alone = batch_of(NATIVE, [(image, 0, column) for image, row, column in images if row == 1])
    texts = ("tokens", "labels", "loss_mask", "position_ids")
    assert content_hashes(alone | {name: batch[name][1:] for name in texts}) == [second]
    changes: dict[str, tuple[int, ...]] = {
        "pixel_values": (16, 5),
        "image_grid_thw": (1, 1),
        "image_positions": (1, 1),
    }
    for name, place in changes.items():
        changed = batch[name].clone()
        changed[place] = float(np.nextafter(changed[place].numpy(), np.float32(9))) if name == "pixel_values" else 7
        hashes = content_hashes(batch | {name: changed})
        assert hashes[0] != first and hashes[1] == second, name
