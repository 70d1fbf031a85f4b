"""Pixels from worker processes, which send levels in 8 bits; and memory that later batches use again."""

from __future__ import annotations

import gc

import pytest
import torch

from megaresume.batches.images import left_memory, shown
from megaresume.batches.loader import StreamDataset, StreamLoader
from megaresume.data.shard_source import ShardSource
from megaresume.encoding.images.pixels import Room
from megaresume.stream.batches import BatchSchedule


def batches(blend, **how):
    loader = StreamLoader(
        blend.open(), BatchSchedule.constant(4), micro_batch_size=4, dp_rank=0, dp_size=1, stop=40, **how
    )
    return list(loader)


def same(one, other) -> None:
    assert one.keys() == other.keys()
    for key in ("pixel_values", "image_grid_thw", "image_positions", "num_tiles", "tokens", "labels", "loss_mask"):
        assert one[key].dtype == other[key].dtype and one[key].shape == other[key].shape
        assert one[key].numpy().tobytes() == other[key].numpy().tobytes(), key
    assert one["faults"] == other["faults"]


@pytest.mark.process
def test_workers_send_levels_and_pixels_arrive(shard_blend, monkeypatch):
    sent = []
    monkeypatch.setattr(
        "megaresume.batches.loader.shown",
        lambda batch, **how: sent.append(batch["pixel_values"]) or shown(batch, **how),
    )
    expected = batches(shard_blend, prefetch=0)
    for one, other in zip(batches(shard_blend, num_workers=2, start_method="fork"), expected, strict=True):
        same(one, other)
    pixels = sum(batch["pixel_values"].nbytes for batch in expected)
    assert {values.dtype for values in sent} == {torch.uint8} and pixels > 100_000
    assert sum(values.nbytes for values in sent) == pixels // 8, "two equal frames, a byte instead of four"


@pytest.mark.parametrize("in_place", [True, False])
def test_levels_become_the_pixels(shard_blend, monkeypatch, in_place):
    dataset = StreamDataset(shard_blend.open())
    if not in_place:
        monkeypatch.setattr(Room, "holds", lambda room, parts: False)
    for first in range(0, 40, 4):
        samples = range(first, first + 4)
        levels = dataset.read(samples, levels=True)
        assert levels["pixel_values"].dtype == torch.uint8
        same(shown(levels), dataset.read(samples))


def test_sources_that_nobody_knows_send_pixels(shard_blend, monkeypatch):
    """A source of somebody's own may do anything with the pixels of ours: it must get them."""

    class Brighter(ShardSource):
        def encoded(self, i, key):
            document = super().encoded(i, key)
            for image in document.images:
                image.pixels[:] += 1
            return document

    stream = shard_blend.open()
    mine = next(source for source in stream.sources if isinstance(source, ShardSource))
    assert mine.levels is not None
    mine.__class__ = Brighter
    assert mine.levels is None
    dataset = StreamDataset(stream)
    same(shown(dataset.read(range(4), levels=True)), dataset.read(range(4)))
    assert dataset.read(range(4), levels=True)["pixel_values"].dtype == torch.float32


def test_sources_that_are_normalised_in_two_ways_send_pixels(shard_blend, monkeypatch):
    stream = shard_blend.open()
    dataset = StreamDataset(stream)
    documents = dataset.assembler.documents
    (number, mine), *_ = documents.sources.items()
    assert documents.levels == mine.levels
    other = type("Other", (), {"levels": None, "encoder": mine.encoder})()
    monkeypatch.setattr(documents, "sources", {number: mine, number + 1: other})
    del documents.levels
    assert documents.levels is None


def test_memory_is_used_again_when_nobody_refers_to_it():
    first = left_memory((1000, 7))
    place, first[:] = first.ctypes.data, 1.0
    part = torch.from_numpy(first[10:20])[2:]
    del first
    gc.collect()
    others = [left_memory((1000, 7)) for _ in range(3)]
    assert place not in [other.ctypes.data for other in others] and bool((part == 1).all())
    for other in others:
        other[:] = 2.0
    assert bool((part == 1).all()), "a part of it is still looked at"
    del part
    gc.collect()
    assert left_memory((900, 7)).ctypes.data == place
    assert len({left_memory((5, 7)).ctypes.data for _ in range(3)}) == 1, "at once, without a collection"


def test_batches_that_are_kept_stay_as_they_are(shard_blend):
    dataset = StreamDataset(shard_blend.open())
    kept = [dataset.read(range(first, first + 4)) for first in range(0, 40, 4)]
    before = [batch["pixel_values"].numpy().tobytes() for batch in kept]
    for first in range(0, 40, 4):
        dataset.read(range(first, first + 4))
    assert [batch["pixel_values"].numpy().tobytes() for batch in kept] == before


def test_a_batch_without_images(shard_blend):
    dataset = StreamDataset(shard_blend.open())
    without = next(sample for sample in range(40) if not len(dataset.read([sample])["num_tiles"]))
    batch = shown(dataset.read([without], levels=True))
    same(batch, dataset.read([without]))
    assert batch["pixel_values"].shape[0] == 0
