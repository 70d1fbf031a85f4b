"""Batches through megatron-core's own models on the CPU: embeddings at the places that the batch says, same losses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megaresume.batches.assemble import make_batch
from megaresume.batches.loader import StreamDataset
from megaresume.batches.models import for_mcore_gpt, for_mcore_llava, packed_seq_params
from megaresume.batches.open import open_stream
from megaresume.cluster.training.model import DocumentAttention
from megaresume.encoding.images.document import Key
from megaresume.stream.errors import UsageError
from tests.batches.pages import Pages

S, SEED, HIDDEN = 96, 5, 32
#: 2 x 2 patches, and the class token, of each tile.
TILES = {"kind": "tiles", "tile_size": 16, "patch_size": 8, "merge": 1, "max_tiles": 3, "extra_tokens": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLaVAModel]:
    """A real LLaVAModel with tiny layers, and attention that obeys the mask that it is given."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)

    def config(**more: object) -> TransformerConfig:
        return TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            persist_layer_norm=False,
            add_bias_linear=True,
            **more,
        )

    language, vision = get_gpt_layer_local_spec(), get_vit_layer_with_local_spec()
    language.submodules.self_attention.submodules.core_attention = DocumentAttention
    vision.submodules.self_attention.submodules.core_attention = _AllAttention
    vision_config = config()
    vision_config.vision_model_type = "internvit"  # CLIP's needs Transformer Engine's norm
    projection = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cuda", lambda self: self)  # for the position ids of the vision model
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")  # for the losses, from megatron-core 0.18 on
        yield LLaVAModel(
            language_transformer_config=config(),
            language_transformer_layer_spec=language,
            language_vocab_size=264,
            language_max_sequence_length=S,
            vision_transformer_config=vision_config,
            vision_transformer_layer_spec=vision,
            drop_vision_class_token=False,
            vision_projection_config=config(ffn_hidden_size=HIDDEN),
            vision_projection_layer_spec=projection.submodules,
            img_h=16,
            img_w=16,
            patch_dim=8,
        ).eval()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class _AllAttention(DocumentAttention):
    """Every patch sees every other."""

    def forward(self, query, key, value, attention_mask, **unused):
        nobody = torch.zeros(1, 1, len(query), len(query), dtype=torch.bool)
        return super().forward(query, key, value, nobody)


@pytest.fixture(scope="module")
def stream():
    config = {"seed": SEED, "seq_length": S, "packing": "best_fit", "sources": {"pages": {"weight": 1}}}
    return open_stream(config, objects={"pages": Pages(TILES, marks="")})


def decoder_input(model: LLaVAModel, arguments: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(embeddings [m, S, h] that the language model gets, losses, the model's loss mask)."""
    seen = {}
    hook = model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    with torch.no_grad():
        losses, mask = model(**arguments)
    hook.remove()
    return seen["decoder_input"].transpose(0, 1), losses, mask


def test_embeddings_land_where_the_batch_says(model, stream):
    batch = StreamDataset(stream).__getitems__([0, 1, 2])
    positions = batch["image_positions"].tolist()
    assert len({len([p for p in positions if p[0] == row]) for row in range(3)}) > 1, "rows of several lengths"
    assert len(set(batch["num_tiles"].tolist())) > 1
    got, losses, mask = decoder_input(model, for_mcore_llava(batch, img_seq_len=model.img_seq_len, packed=False))
    with torch.no_grad():
        features = model.vision_projection(model.vision_model(batch["pixel_values"]).permute(1, 0, 2).contiguous())
        expected = model.language_model.embedding(
            input_ids=batch["tokens"].where(batch["tokens"] != 257, 0), position_ids=batch["position_ids"]
        ).transpose(0, 1)
    tile = 0
    for (row, column, num), tiles in zip(positions, batch["num_tiles"].tolist(), strict=True):
        # [features a tile, tiles, h] -> one tile after another
        expected[row, column : column + num] = features[:, tile : tile + tiles].transpose(0, 1).flatten(0, 1)
        tile += tiles
    assert got.shape == (3, S, HIDDEN)
    torch.testing.assert_close(got, expected)
    assert losses.shape == mask.shape == (3, S)
    # Its mask is ours, but for the first token behind an image.
    behind = torch.zeros_like(mask)
    for row, column, num in positions:
        behind[row, column + num - 1] = batch["loss_mask"][row, column + num - 1]
    assert behind.sum() > 3
    assert torch.equal(mask + behind, batch["loss_mask"])


def test_a_packed_document_has_the_losses_that_it_has_alone(model, stream):
    """Labels included: also that of the last token of an image."""
    plan = stream.plan(0, 3)
    batch = StreamDataset(stream).__getitems__([0, 1, 2])
    _, losses, _ = decoder_input(model, for_mcore_llava(batch, img_seq_len=model.img_seq_len, packed=False))
    num_images = 0
    for row, segments in enumerate(plan):
        for segment, start in zip(segments, batch["cu_seqlens"][row].tolist(), strict=False):
            key = Key(seed=SEED, source="pages", document=segment.document, epoch=segment.epoch)
            document = stream.sources[0].encoded(segment.document, key)
            tokens, images = torch.from_numpy(document.tokens), document.images
            ids, previous = [], 0
            for image in images:
                ids += [*tokens[previous : image.offset].tolist(), -200]
                previous = image.offset + image.num_tokens
            ids += tokens[previous:].tolist()
            pixels = np.concatenate([i.pixels for i in images]) if images else np.zeros((0, 3, 16, 16), np.float32)
            num = len(tokens)
            with torch.no_grad():
                logits, _ = model(
                    images=torch.from_numpy(pixels),
                    input_ids=torch.tensor([ids]),
                    position_ids=_positions(ids, images),
                    attention_mask=torch.ones(1, 1, num, num).triu(1).bool(),
                    num_image_tiles=torch.tensor([len(i.pixels) for i in images], dtype=torch.int32),
                )
            alone = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[1:], reduction="none")
            counted = torch.from_numpy(document.trained[1:])
            torch.testing.assert_close(losses[row, start : start + num - 1][counted], alone[counted])
            num_images += len(images)
    assert num_images == len(batch["num_tiles"]) > 5


def _positions(ids, images):
    """Of the tokens in the document, an image counted in full."""
    positions, at, sizes = [], 0, iter([i.num_tokens for i in images])
    for token in ids:
        positions.append(at)
        at += next(sizes) if token == -200 else 1
    return torch.tensor([positions])


def test_the_lines_of_the_guide(model, stream):
    text = (Path(__file__).parents[2] / "docs" / "batches.md").read_text()
    [lines] = [code for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "for_mcore_llava" in code]
    names = {"model": model, "batch": StreamDataset(stream)[0]}
    exec(lines, names)
    assert 1 < names["loss"].item() < 7


def test_images_of_another_length_than_the_models_are_refused(model, stream):
    batch = StreamDataset(stream)[0]
    with pytest.raises(UsageError, match="other lengths"):
        for_mcore_llava(batch, img_seq_len=model.img_seq_len - 1)


def test_packed_parameters_are_the_bounds_of_the_documents(stream):
    dataset = StreamDataset(stream)
    batch = dataset.__getitems__([3, 4])
    params = packed_seq_params(batch["cu_seqlens"])
    assert params.qkv_format == "thd" and params.cu_seqlens_q.dtype == torch.int32
    first, second = (bounds.tolist() for bounds in batch["cu_seqlens"])
    assert params.cu_seqlens_q.tolist() == first + [S + bound for bound in second[1:]]
    assert params.cu_seqlens_kv_padded is params.cu_seqlens_q
    lengths = np.diff(params.cu_seqlens_q.tolist())
    assert params.max_seqlen_q == max(lengths) == params.max_seqlen_kv
    with pytest.raises(UsageError, match="micro-batches of one sample"):
        for_mcore_llava(batch, img_seq_len=5)
    arguments = for_mcore_llava(dataset[3], img_seq_len=5)
    assert arguments["attention_mask"] is None and arguments["packed_seq_params"].cu_seqlens_q.tolist() == first


def test_text_for_gpt(image_blend, text_blend):
    stream = text_blend.open()
    batch = StreamDataset(stream).__getitems__([0, 1])
    joined = for_mcore_gpt(batch)
    assert joined["input_ids"].shape == (1, 256) and joined["attention_mask"] is None
    for key, name in (("input_ids", "tokens"), ("labels", "labels"), ("loss_mask", "loss_mask")):
        assert torch.equal(joined[key][0], batch[name].flatten())
    bounds = joined["packed_seq_params"].cu_seqlens_q
    assert torch.equal((joined["position_ids"][0] == 0).nonzero().flatten(), bounds[:-1].long())
    masked = for_mcore_gpt(batch, packed=False)
    expected = make_batch(stream.plan(0, 2), StreamDataset(stream).assembler, attention_mask=True)["attention_mask"]
    assert torch.equal(masked["attention_mask"], expected) and masked["input_ids"].shape == (2, 128)
    with pytest.raises(UsageError, match="without image sources"):
        for_mcore_llava(batch, img_seq_len=5)
