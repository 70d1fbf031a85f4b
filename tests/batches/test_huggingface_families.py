"""Families whose images are tiles or rows of tokens: packed batches against the same documents one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from megaresume.batches.loader import StreamDataset
from megaresume.batches.models import for_hf
from megaresume.batches.open import open_stream
from megaresume.encoding.images.document import Key
from megaresume.stream.errors import UsageError
from tests.batches.pages import Pages
from tests.batches.test_huggingface import LANGUAGE, SEED
from tests.encoding.images.models_kit import IMAGE_TOKENS, write_processor

VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 4}
PINPOINTS = [[16, 32], [32, 16], [32, 32], [16, 48]]
#: model -> (family of `for_hf`, family of processors).
MODELS = {
    "LlavaNext": ("llava_next", "llava_next"),
    "LlavaOnevision": ("llava_onevision", "llava_onevision"),
    "Idefics3": ("idefics3", "idefics3"),
    "SmolVLM": ("idefics3", "smolvlm"),
    "Llava": ("pixtral", "pixtral"),
    "Mistral3": ("pixtral", "mistral3"),
}
LENGTH = 512


def model_of(name: str, image_token: int) -> torch.nn.Module:
    torch.manual_seed(0)
    language = transformers.LlamaConfig(**{**LANGUAGE, "vocab_size": 300, "max_position_embeddings": LENGTH})
    rest = {"text_config": language}
    if name in ("Llava", "Mistral3"):
        rest |= {"vision_config": transformers.PixtralVisionConfig(**{**VISION, "image_size": 32, "head_dim": 16})}
        rest |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        rest |= {"spatial_merge_size": 2} if name == "Mistral3" else {}
    elif name in ("Idefics3", "SmolVLM"):
        vision = getattr(transformers, f"{name}VisionConfig")
        rest |= {"vision_config": vision(**VISION), "scale_factor": 2, "pad_token_id": 0}
    else:
        vision = transformers.CLIPVisionConfig if name == "LlavaNext" else transformers.SiglipVisionConfig
        rest |= {"vision_config": vision(**VISION), "image_grid_pinpoints": PINPOINTS, "vision_feature_layer": -1}
    rest |= (
        {"image_token_id": image_token} if "image_grid_pinpoints" not in rest else {"image_token_index": image_token}
    )
    config = getattr(transformers, f"{name}Config")(**rest)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


def stream_of(name: str, directory) -> object:
    family, processors = MODELS[name]
    write_processor(directory, processors)
    pages = Pages(
        {"kind": "transformers", "model": str(directory)},
        tokenizer=str(directory),
        image_token=IMAGE_TOKENS[processors],
        most_images=1 if family == "llava_onevision" else 2,
    )
    config = {"seed": SEED, "seq_length": LENGTH, "packing": {"mode": "best_fit"}, "sources": {"pages": {"weight": 1}}}
    return open_stream(config, objects={"pages": pages})


def alone(family: str, images) -> dict[str, torch.Tensor]:
    """The images of a document as transformers' own processor hands them to the model."""
    if not images:
        return {}
    sizes = torch.tensor([image.grid[1:] for image in images])
    if family == "pixtral":
        edge = 4
        whole = np.zeros((len(images), 3, *sizes.max(dim=0).values.tolist()), np.float32)
        for out, image in zip(whole, images, strict=True):
            columns = image.grid[2] // edge
            for k, patch in enumerate(image.pixels.reshape(-1, 3, edge, edge)):
                y, x = k // columns * edge, k % columns * edge
                out[:, y : y + edge, x : x + edge] = patch
        return {"pixel_values": torch.from_numpy(whole), "image_sizes": sizes}
    if family == "idefics3":
        pixels = torch.from_numpy(np.concatenate([image.pixels for image in images]))[None]
        return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, pixels.shape[1], 16, 16)}
    most = max(len(image.pixels) for image in images)
    padded = np.zeros((len(images), most, 3, 16, 16), np.float32)
    for out, image in zip(padded, images, strict=True):
        out[: len(image.pixels)] = image.pixels
    return {"pixel_values": torch.from_numpy(padded), "image_sizes": sizes}


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_of_a_packed_batch_is_the_mean_over_its_documents(name, tmp_path):
    family = MODELS[name][0]
    stream = stream_of(name, tmp_path)
    source = stream.sources[0]
    batch, model = StreamDataset(stream).__getitems__([0, 1]), model_of(name, source.encoder.image_token_id)
    assert len(batch["num_tiles"]) > 4 and min(len(bounds) for bounds in batch["cu_seqlens"]) > 3
    assert len({tuple(grid) for grid in batch["image_grid_thw"].tolist()}) > 2
    total, count = 0.0, 0
    with torch.no_grad():
        loss = model(**for_hf(batch, family=family)).loss.item()
        for segments in stream.plan(0, 2):
            for s in segments:
                key = Key(seed=SEED, source="pages", document=s.document, epoch=s.epoch)
                document = source.encoded(s.document, key)
                tokens = torch.from_numpy(document.tokens)[None]
                labels = torch.where(torch.from_numpy(document.trained)[None], tokens, -100)
                num = int((labels[:, 1:] != -100).sum())
                images = alone(family, document.images)
                total += num * model(input_ids=tokens, labels=labels, **images).loss.item() if num else 0.0
                count += num
    assert count == int(batch["loss_mask"].sum()) > 100
    assert loss == pytest.approx(total / count, abs=2e-5)


def test_pixtral_refuses_patches_that_do_not_fill_their_images():
    pages = Pages(
        {"kind": "native", "patch_size": 4, "merge": 1, "temporal_patch_size": 1, "min_pixels": 64, "max_pixels": 1024}
    )
    config = {"seed": SEED, "seq_length": LENGTH, "packing": {"mode": "best_fit"}, "sources": {"pages": {"weight": 1}}}
    batch = StreamDataset(open_stream(config, objects={"pages": pages})).__getitems__([0])
    with pytest.raises(UsageError, match="not as pixtral takes them"):
        for_hf(batch, family="pixtral")


def test_a_text_that_has_the_image_token_is_refused_where_images_are_found_by_it():
    pages = Pages({"kind": "patches", "size": 16, "patch_size": 4, "fit": "stretch"})
    config = {"seed": SEED, "seq_length": 128, "packing": {"mode": "best_fit"}, "sources": {"pages": {"weight": 1}}}
    batch = StreamDataset(open_stream(config, objects={"pages": pages})).__getitems__([0])
    batch["tokens"][0, -1] = pages.encoder.image_token_id
    with pytest.raises(UsageError, match="a text contains the image token"):
        for_hf(batch, family="gemma3", sliding_window=16)
