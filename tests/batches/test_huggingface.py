"""Packed batches through models of transformers, against the same documents one by one, as those models want them."""

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

PATCHES = {"kind": "patches", "size": 16, "patch_size": 4, "fit": "stretch"}
TILES = {"kind": "tiles", "tile_size": 16, "patch_size": 4, "merge": 2, "max_tiles": 3}
NATIVE = {"kind": "native", "patch_size": 4, "merge": 2, "min_pixels": 64, "max_pixels": 1024}
PROCESSORS = {"llava": PATCHES, "internvl": TILES, "qwen2_vl": NATIVE, "causal_lm": PATCHES}
PROCESSORS["gemma3"] = {**PATCHES, "merge": 2, "normalize": "siglip"}
LANGUAGE = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SEED = 11


def model_of(family: str, attention: str = "sdpa") -> torch.nn.Module:
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 4}
    if family == "llava":
        config = transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**vision),
            text_config=transformers.LlamaConfig(**LANGUAGE),
            image_token_index=257,
            vision_feature_layer=-1,
        )
        model = transformers.LlavaForConditionalGeneration
    elif family == "internvl":
        vision |= {"image_size": [16, 16], "patch_size": [4, 4]}
        config = transformers.InternVLConfig(
            vision_config=transformers.InternVLVisionConfig(**vision),
            text_config=transformers.Qwen2Config(**LANGUAGE),
            image_token_id=257,
            image_seq_length=4,
        )
        model = transformers.InternVLForConditionalGeneration
    elif family == "qwen2_vl":
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
        config = transformers.Qwen2VLConfig(
            vision_config={
                "depth": 1,
                "embed_dim": 32,
                "num_heads": 2,
                "hidden_size": 32,
                "mlp_ratio": 1,
                "patch_size": 4,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
            text_config={**LANGUAGE, "rope_parameters": rope},
            image_token_id=257,
        )
        model = transformers.Qwen2VLForConditionalGeneration
    elif family == "gemma3":
        config = transformers.Gemma3Config(
            vision_config=transformers.SiglipVisionConfig(**vision),
            # a layer that sees 16 tokens, and one that sees all
            text_config={
                **LANGUAGE,
                "head_dim": 8,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            mm_tokens_per_image=4,
            image_token_id=257,
        )
        made = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation=attention).eval()
        # as published its images count; as made, they are multiplied by 0
        torch.nn.init.normal_(made.model.multi_modal_projector.mm_input_projection_weight)
        return made
    else:
        config, model = transformers.LlamaConfig(**LANGUAGE), transformers.LlamaForCausalLM
    config._attn_implementation = attention
    return model._from_config(config, attn_implementation=attention).eval()


def stream_of(family: str, changed_objects=None, **changes):
    words = np.random.default_rng(3)
    notes = [words.integers(0, 256, n) for n in words.integers(2, 40, 40)]
    sources = {"notes": {"weight": 1}} | ({} if family == "causal_lm" else {"pages": {"weight": 3}})
    config = {"seed": SEED, "seq_length": 128, "packing": {"mode": "best_fit", "align": 4}, "sources": sources}
    objects = {"notes": _Notes(notes)} | ({} if family == "causal_lm" else {"pages": Pages(PROCESSORS[family])})
    return open_stream(config | changes, objects=objects | (changed_objects or {}))


class _Notes:
    def __init__(self, documents):
        self.documents = documents

    def __len__(self):
        return len(self.documents)

    def length(self, i):
        return len(self.documents[i])

    def get(self, i):
        return self.documents[i]


def one_by_one(model, family, stream, plan):
    """(sum of the losses, trained tokens) of every document of these samples, each alone in transformers' own form."""
    total, count = 0.0, 0
    for segments in plan:
        for s in segments:
            source = stream.sources[s.source]
            arguments = {}
            if hasattr(source, "encoded"):
                key = Key(seed=SEED, source="pages", document=s.document, epoch=s.epoch)
                document = source.encoded(s.document, key)
                tokens, trained = torch.from_numpy(document.tokens), torch.from_numpy(document.trained)
                if document.images:
                    arguments["pixel_values"] = torch.from_numpy(np.concatenate([i.pixels for i in document.images]))
                    if family == "qwen2_vl":
                        arguments["image_grid_thw"] = torch.tensor([i.grid for i in document.images])
                        arguments["mm_token_type_ids"] = (tokens == 257).int()[None]
                if family == "gemma3":
                    arguments["token_type_ids"] = (tokens == 257).long()[None]
            else:
                tokens = torch.from_numpy(np.asarray(source.get(s.document), np.int64))
                trained = torch.ones(len(tokens), dtype=torch.bool)
            labels = torch.where(trained, tokens, -100)[None]
            num = int((labels[:, 1:] != -100).sum())
            if num:
                total += num * model(input_ids=tokens[None], labels=labels, **arguments).loss.item()
                count += num
    return total, count


@pytest.mark.parametrize("family", ["causal_lm", "llava", "internvl", "qwen2_vl"])
@pytest.mark.parametrize("attention, mask_dtype", [("sdpa", None), ("eager", torch.float32)])
def test_the_loss_of_a_packed_batch_is_the_mean_over_its_documents(family, attention, mask_dtype):
    stream, model = stream_of(family), model_of(family, attention)
    batch = StreamDataset(stream).__getitems__([0, 1, 2])
    assert min(len(bounds) for bounds in batch["cu_seqlens"]) > 3
    with torch.no_grad():
        loss = model(**for_hf(batch, family=family, mask_dtype=mask_dtype)).loss.item()
        total, count = one_by_one(model, family, stream, stream.plan(0, 3))
    assert count == int(batch["loss_mask"].sum()) > 100
    if family != "causal_lm":
        assert len(batch["num_tiles"]) > 4
    assert loss == pytest.approx(total / count, abs=2e-5)


@pytest.mark.parametrize("attention, mask_dtype", [("sdpa", None), ("eager", torch.float32)])
def test_gemma_3_lets_an_image_see_all_of_itself_and_nothing_of_other_documents(attention, mask_dtype):
    # without marks: images that touch, in a document and on both sides of the edge of two
    bare = Pages(PROCESSORS["gemma3"], marks="", eod=False)
    for objects in ({}, {"pages": bare}):
        stream, model = stream_of("gemma3", objects), model_of("gemma3", attention)
        batch = StreamDataset(stream).__getitems__([0, 1, 2])
        assert len(batch["num_tiles"]) > 4
        arguments = for_hf(batch, family="gemma3", mask_dtype=mask_dtype, sliding_window=16)
        assert (arguments["token_type_ids"] == (batch["tokens"] == 257)).all()
        with torch.no_grad():
            loss = model(**arguments).loss.item()
            total, count = one_by_one(model, "gemma3", stream, stream.plan(0, 3))
        assert count == int(batch["loss_mask"].sum()) > 100
        assert loss == pytest.approx(total / count, abs=2e-5)
    with pytest.raises(UsageError, match="window of its sliding layers"):
        for_hf(batch, family="gemma3")


def test_gemma_3_keeps_images_of_two_documents_that_touch_apart():
    batch = StreamDataset(stream_of("gemma3")).__getitems__([0])
    _, column, num = batch["image_positions"][0].tolist()
    tokens = torch.zeros_like(batch["tokens"])
    tokens[0, column - num : column + num] = 257
    touching = {**batch, "tokens": tokens, "image_positions": torch.tensor([[0, column - num, num], [0, column, num]])}
    for edge, together in ((None, True), (column, False)):
        bounds = torch.tensor([0, *([edge] if edge else []), 128])
        masks = for_hf({**touching, "cu_seqlens": [bounds]}, family="gemma3", sliding_window=16)["attention_mask"]
        for mask in masks.values():
            assert mask[0, 0, column - 1, column] == mask[0, 0, column, column - 1] == together
            assert mask[0, 0, column, column + num - 1]


def test_qwen3_vl_takes_the_same_as_qwen2_vl():
    torch.manual_seed(0)
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 32}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "deepstack_visual_indexes": [0]}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0, "mrope_interleaved": True}
    config = transformers.Qwen3VLConfig(
        vision_config={**vision, "num_position_embeddings": 64},
        text_config={**LANGUAGE, "head_dim": 8, "rope_parameters": rope},
        image_token_id=257,
    )
    stream, model = stream_of("qwen2_vl"), transformers.Qwen3VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        loss = model(**for_hf(StreamDataset(stream).__getitems__([0, 1]), family="qwen2_vl")).loss.item()
        total, count = one_by_one(model, "qwen2_vl", stream, stream.plan(0, 2))
    assert loss == pytest.approx(total / count, abs=2e-5)


def test_qwen2_5_vl_takes_the_same():
    torch.manual_seed(0)
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 32}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = transformers.Qwen2_5_VLConfig(
        vision_config={**vision, "fullatt_block_indexes": [0]},
        text_config={**LANGUAGE, "rope_parameters": rope},
        image_token_id=257,
    )
    stream, model = stream_of("qwen2_vl"), transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        loss = model(**for_hf(StreamDataset(stream).__getitems__([0, 1]), family="qwen2_vl")).loss.item()
        total, count = one_by_one(model, "qwen2_vl", stream, stream.plan(0, 2))
    assert loss == pytest.approx(total / count, abs=2e-5)


def test_a_document_that_is_cut_keeps_the_label_of_its_last_token():
    """In the next sample it has no token before it that could predict it."""
    stream, model = stream_of("causal_lm", packing="split", seq_length=32), model_of("causal_lm")
    batch = StreamDataset(stream)[0]
    assert batch["loss_mask"][0, -1] == 1
    arguments = for_hf(batch, family="causal_lm")
    with torch.no_grad():
        out = model(**arguments)
        losses = torch.nn.functional.cross_entropy(out.logits[0], batch["labels"][0], reduction="none")
    expected = (losses * batch["loss_mask"][0]).sum() / batch["loss_mask"].sum()
    assert out.loss.item() == pytest.approx(expected.item(), abs=1e-6)
    # labels follow transformers' convention for whoever shifts them
    assert (arguments["labels"][0, 1:] == arguments["shift_labels"][0, :-1]).all()
    named = arguments["labels"][0] != -100
    assert (arguments["labels"][0][named] == batch["tokens"][0][named]).all()


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_a_batch_without_an_image(family):
    sources = {"notes": {"weight": 20}, "pages": {"weight": 1}}
    stream, model = stream_of(family, sources=sources), model_of(family)
    dataset = StreamDataset(stream)
    sample = next(i for i in range(50) if all(s.source == 0 for s in stream.plan(i, i + 1).segments(i)))
    batch = dataset[sample]
    assert batch["pixel_values"].shape == (0, *stream.sources[1].encoder.pixel_shape)
    arguments = for_hf(batch, family=family)
    assert "pixel_values" not in arguments
    with torch.no_grad():
        loss = model(**arguments).loss.item()
        total, count = one_by_one(model, family, stream, stream.plan(sample, sample + 1))
    assert loss == pytest.approx(total / count, abs=2e-5)


def test_pixels_of_another_family_are_refused():
    batch = StreamDataset(stream_of("qwen2_vl"))[0]
    with pytest.raises(UsageError, match="as llava takes them"):
        for_hf(batch, family="llava")
    with pytest.raises(UsageError, match="without vision"):
        for_hf(batch, family="causal_lm")
    with pytest.raises(UsageError, match="unknown family"):
        for_hf(batch, family="llama")
