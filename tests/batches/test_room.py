"""Batches whose pixels were written in place, and the same ones copied together."""

from __future__ import annotations

from megaresume.batches import assemble
from megaresume.batches.loader import StreamDataset
from megaresume.encoding.images.pixels import Room


def test_in_place_or_copied_is_the_same(shard_blend, monkeypatch):
    dataset = StreamDataset(shard_blend.open())
    held: list[bool] = []
    monkeypatch.setattr(
        Room, "holds", lambda room, parts, holds=Room.holds: held.append(holds(room, parts)) or held[-1]
    )
    in_place = [dataset.__getitems__(range(first, first + 4)) for first in range(0, 40, 4)]
    assert all(held) and len(held) == len(in_place)
    monkeypatch.setattr(assemble, "room_of", lambda *_, **__: None)
    for first, one in zip(range(0, 40, 4), in_place, strict=True):
        other = dataset.__getitems__(range(first, first + 4))
        assert one["pixel_values"].numpy().tobytes() == other["pixel_values"].numpy().tobytes()
        # What is saved or sent with the tensor is its rows alone, not the room left behind them.
        assert one["pixel_values"].untyped_storage().nbytes() == one["pixel_values"].nbytes
    assert sum(len(one["pixel_values"]) for one in in_place) > 100
