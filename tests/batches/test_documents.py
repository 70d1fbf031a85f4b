"""Image-text documents in batches, against the documents themselves; and encoders that break their word."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from megaresume.batches.loader import StreamDataset
from megaresume.data.source import DocumentSource, is_document_source
from megaresume.data.split import range_of
from megaresume.encoding.images.document import Key
from megaresume.stream.errors import ConfigError, CorpusError, UsageError
from tests.batches.conftest import IMAGE_TOKEN, PIXEL_SHAPE, Pictures


def expected_batch(stream, samples, align, pad_id=9):
    """Row by row in plain Python: (tokens, labels, loss_mask, pixels, grids, positions, faults)."""
    shape = (len(samples), stream.config.seq_length)
    tokens, labels, mask = np.full(shape, pad_id), np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    pixels, grids, positions, faults = [], [], [], []
    names = [s.name for s in stream.config.sources]
    for row, sample in enumerate(samples):
        column = 0
        for s in stream.plan(sample, sample + 1).segments(sample):
            source = stream.sources[s.source]
            if is_document_source(source):
                key = Key(seed=stream.config.seed, source=names[s.source], document=s.document, epoch=s.epoch)
                document = source.encoded(s.document, key)
                words, trained = document.tokens, document.trained
                for image in document.images:
                    pixels.append(image.pixels)
                    grids.append(list(image.grid))
                    positions.append([row, column + image.offset, image.num_tokens])
                if document.fault is not None:
                    faults.append(
                        (sample, names[s.source], s.document, s.epoch, document.fault.policy, document.fault.reason)
                    )
            else:
                words, trained = source.get(s.document), np.ones(s.length, bool)
            for i in range(s.length):
                tokens[row, column + i] = words[i]
                if i + 1 < s.length:
                    labels[row, column + i] = words[i + 1]
                    mask[row, column + i] = trained[i + 1]
            column = -(-(column + s.length) // align) * align
    return tokens, labels, mask, pixels, grids, positions, faults


@pytest.mark.parametrize("kind", ["image", "shard"])
@pytest.mark.parametrize("mode, align", [("best_fit", 1), ("best_fit", 8), ("none", 1)])
def test_batches_hold_the_documents_of_the_plan(request, kind, mode, align):
    stream = request.getfixturevalue(f"{kind}_blend").open(packing={"mode": mode, "align": align}, seq_length=320)
    samples = [4, 5, 6, 200, 201, 2, 70]
    batch = StreamDataset(stream, pad_id=9).__getitems__(samples)
    tokens, labels, mask, pixels, grids, positions, faults = expected_batch(stream, samples, align)
    assert np.array_equal(batch["tokens"], tokens)
    assert np.array_equal(batch["labels"], labels)
    assert np.array_equal(batch["loss_mask"], mask)
    assert batch["image_grid_thw"].tolist() == grids
    assert batch["image_positions"].tolist() == positions
    assert batch["num_tiles"].tolist() == [len(p) for p in pixels]
    assert batch["pixel_values"].numpy().tobytes() == b"".join(p.tobytes() for p in pixels)
    assert batch["faults"] == faults
    assert len(pixels) > 1
    dtypes = {key: batch[key].dtype for key in ("pixel_values", "image_grid_thw", "image_positions", "num_tiles")}
    assert list(dtypes.values()) == [torch.float32, torch.int64, torch.int64, torch.int32]


@pytest.mark.parametrize("kind", ["image", "shard"])
def test_faults_are_those_of_the_broken_records(request, kind):
    """Named by sample, source, document and epoch; no image of them is in the batch."""
    stream = request.getfixturevalue(f"{kind}_blend").open()
    batch = StreamDataset(stream).__getitems__(range(150))
    assert len(batch["faults"]) > 3
    for sample, name, document, epoch, policy, reason in batch["faults"]:
        number = [s.name for s in stream.config.sources].index(name)
        [segment] = [
            s for s in stream.plan(sample, sample + 1).segments(sample) if s.source == number and s.document == document
        ]
        assert (segment.epoch, policy) == (epoch, "mask") and reason
        assert document % 7 == 0 if kind == "image" else document in (7, 33)


def test_augmentation_is_drawn_anew_in_every_epoch(shard_blend):
    """And by nothing else: the same document of the same epoch has the same pixels wherever it is read."""
    stream = shard_blend.open()
    number = [s.name for s in stream.config.sources].index("pages")
    seen: dict[int, dict[int, bytes]] = {}
    dataset = StreamDataset(stream)
    for sample in range(250):
        batch = dataset[sample]
        ends = batch["num_tiles"].cumsum(0).tolist()
        for s, start in zip(
            stream.plan(sample, sample + 1).segments(sample), batch["cu_seqlens"][0].tolist(), strict=False
        ):
            inside = [
                batch["pixel_values"][end - k : end].numpy().tobytes()
                for (_, column, _), end, k in zip(
                    batch["image_positions"].tolist(), ends, batch["num_tiles"].tolist(), strict=True
                )
                if start <= column < start + s.length
            ]
            if s.source == number and inside:
                seen.setdefault(s.document, {})[s.epoch] = b"".join(inside)
    again = [epochs for epochs in seen.values() if len(epochs) > 1]
    assert len(again) > 10
    assert all(len(set(epochs.values())) == len(epochs) for epochs in again)


def test_a_batch_without_an_image_has_the_keys_too(image_blend):
    stream = image_blend.open()
    sample = next(i for i in range(200) if all(s.source < 3 for s in stream.plan(i, i + 1).segments(i)))
    batch = StreamDataset(stream)[sample]
    assert batch["pixel_values"].shape == (0, *PIXEL_SHAPE)
    assert batch["image_grid_thw"].shape == batch["image_positions"].shape == (0, 3)
    assert batch["num_tiles"].shape == (0,) and batch["faults"] == []


def test_a_blend_of_text_has_none_of_them(text_blend):
    assert not {"pixel_values", "image_positions", "faults"} & set(StreamDataset(text_blend.open())[0])


def _shorter(document):
    return dataclasses.replace(document, tokens=document.tokens[:-1], trained=document.trained[:-1])


def _moved(document):
    images = [dataclasses.replace(i, offset=i.offset + 1) for i in document.images]
    return dataclasses.replace(document, images=tuple(images))


def _other_pixels(document):
    images = [dataclasses.replace(i, pixels=i.pixels[:, :-1]) for i in document.images]
    return dataclasses.replace(document, images=tuple(images))


def _stray(document):
    return dataclasses.replace(document, tokens=np.append(document.tokens[:-1], IMAGE_TOKEN))


def _trained(document):
    return dataclasses.replace(document, trained=document.trained | (document.tokens == IMAGE_TOKEN))


def _twice(document):
    return dataclasses.replace(document, images=document.images + document.images[:1])


@pytest.mark.parametrize("broken", [_shorter, _moved, _other_pixels, _stray, _trained, _twice])
def test_an_encoder_that_breaks_its_word_is_refused(image_blend, broken):
    class Broken(Pictures):
        def encoded(self, i, key):
            return broken(super().encoded(i, key))

    stream = dataclasses.replace(image_blend, objects=image_blend.objects | {"pairs": Broken()}).open()
    with pytest.raises(CorpusError, match=r"source 'pairs': document .* is encoded wrongly"):
        StreamDataset(stream).__getitems__(range(40))


def test_sources_that_are_encoded_in_different_ways_are_refused(image_blend):
    class Other(Pictures):
        encoder = type("Encoder", (), {"image_token_id": 3, "pixel_shape": (5,)})()

    stream = dataclasses.replace(image_blend, objects=image_blend.objects | {"figures": Other(23)}).open()
    with pytest.raises(ConfigError, match="encoded in different ways") as error:
        StreamDataset(stream)[0]
    assert "'pairs'" in str(error.value) and "'figures'" in str(error.value)


def test_a_loop_that_has_no_place_for_images_is_refused(image_blend):
    """Megatron's own pretrain_gpt.py takes tokens alone: it would train on image tokens without a word."""
    from megaresume.hosts.megatron.samples import SampleDataset, SampleForm

    dataset = SampleDataset(image_blend.open(), SampleForm(across=False), num_samples=8)
    with pytest.raises(UsageError, match="takes only tokens") as error:
        dataset[0]
    assert "pairs, figures" in str(error.value)


def test_an_object_that_is_half_a_source_of_images_is_refused(image_blend):
    class Half:
        __len__, length, get, encoded = Pictures.__len__, Pictures.length, Pictures.get, Pictures.encoded

    with pytest.raises(ConfigError, match="has `encoded`") as error:
        dataclasses.replace(image_blend, objects=image_blend.objects | {"pairs": Half()}).open()
    assert "lengths, read, fingerprint, whole, encoder" in str(error.value)


def test_a_part_of_a_source_has_its_images(shard_blend):
    """Numbers are those in the part; the record is that of the whole."""
    whole = shard_blend.open().sources[3]
    part = range_of(whole, 10, 30)
    assert is_document_source(part) and isinstance(part, DocumentSource)
    key = Key(seed=1, source="pages", document=4, epoch=0)
    a, b = part.encoded(4, key), whole.encoded(14, key)
    assert np.array_equal(a.tokens, b.tokens) and len(a.images) == len(b.images) > 0
    assert all(np.array_equal(x.pixels, y.pixels) for x, y in zip(a.images, b.images, strict=True))


def test_a_source_is_told_without_its_encoder(shard_blend):
    """A process that only plans must not build the tokenizer."""
    stream = shard_blend.open()
    stream.plan(0, 8)
    assert "encoder" not in vars(stream.sources[3])
    StreamDataset(stream)[0]
    assert "encoder" in vars(stream.sources[3])


def test_images_that_lie_side_by_side_keep_their_order(image_blend):
    positions = StreamDataset(image_blend.open()).__getitems__(range(30))["image_positions"].tolist()
    assert positions == sorted(positions) and len(positions) > 30
    assert any(a[0] == b[0] and a[1] + a[2] == b[1] for a, b in itertools.pairwise(positions))
