"""Other augmentation at a resume: the same documents, other pixels. Noticed, and recorded where it is accepted."""

from __future__ import annotations

import pytest

from megaresume.batches.assemble import make_batch
from megaresume.batches.loader import StreamDataset
from megaresume.batches.open import open_stream
from megaresume.checkpoint.records.rank_log import hash_rows
from megaresume.runs.trace.ranks import Contents
from megaresume.runs.trace.replan import Planned
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import ConfigError, StateError
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from tests.batches.conftest import Blend

WAS = [{"flip": {"p": 0.5}}, {"crop": {"scale": [0.6, 1.0], "p": 1.0}}]


def opened(blend: Blend, augment: object, state: StreamState | None = None, on_change: str = "refuse") -> Stream:
    pages = {key: value for key, value in blend.config["sources"]["pages"].items() if key != "augment"}
    if augment is not None:
        pages["augment"] = augment
    config = blend.config | {"sources": blend.config["sources"] | {"pages": pages}}
    return open_stream(config, objects=blend.objects, state=state, on_change=on_change)


def pixels(stream: Stream, first: int, stop: int) -> bytes:
    dataset = StreamDataset(stream)
    batch = make_batch(stream.plan(first, stop), dataset.assembler_of(first, stop))
    return batch["pixel_values"].numpy().tobytes()


def hashes(stream: Stream, first: int, stop: int) -> list[int]:
    """As the log of samples has them, of what training reads."""
    batch = make_batch(stream.plan(first, stop), StreamDataset(stream).assembler_of(first, stop))
    images = batch["pixel_values"].split(batch["num_tiles"].tolist())
    rows = batch["image_positions"][:, 0].tolist()
    found = hash_rows(batch["tokens"].numpy(), [(r, i.numpy()) for r, i in zip(rows, images, strict=True)])
    return [int(value) for value in found]


@pytest.fixture(scope="module")
def saved(shard_blend: Blend) -> StreamState:
    return StreamState.from_json(opened(shard_blend, WAS).state_at(10).to_json())


def test_the_same_steps_written_shorter_are_no_change(shard_blend: Blend, saved: StreamState) -> None:
    again = opened(shard_blend, [{"flip": 0.5}, {"crop": {"scale": [0.6, 1.0]}}], saved)
    assert again.accepted == ()
    assert pixels(again, 10, 20) == pixels(opened(shard_blend, WAS), 10, 20)


@pytest.mark.parametrize("augment", [None, [], [WAS[1], WAS[0]], [{"flip": 0.4}, WAS[1]]])
def test_another_augmentation_is_refused(shard_blend: Blend, saved: StreamState, augment: object) -> None:
    with pytest.raises(StateError, match=r"(?s)sources\.pages\.augment.*--megaresume-on-change stage"):
        opened(shard_blend, augment, saved)


def test_accepted_it_is_recorded_and_the_past_keeps_its_own(shard_blend: Blend, saved: StreamState) -> None:
    before, now = opened(shard_blend, WAS), opened(shard_blend, [{"flip": 1.0}], saved, "stage")
    assert any("sources.pages.augment" in words and "crop" in words for words in now.accepted)
    assert hashes(now, 10, 20) != hashes(before, 10, 20)
    later = StreamState.from_json(now.state_at(20).to_json())
    assert [record.config["sources"]["pages"].get("augment") for record in later.stages] == [WAS, [{"flip": {"p": 1}}]]
    assert any("sources.pages.augment" in words for words in later.overrides)
    # What verifies the past reads it with the augmentation of that time, whatever the data config of today says.
    then, today = (StreamConfig.from_dict(record.config) for record in later.stages)
    reader = Contents([source.name for source in today.sources], now.sources)
    past = Planned(stage="", config=then, plan=before.plan(0, 10))
    assert reader.samples([past], 0).tolist() == hashes(before, 0, 10)
    assert reader.samples([Planned(stage="", config=today, plan=now.plan(10, 20))], 0).tolist() == hashes(now, 10, 20)


def test_a_mistake_is_named(shard_blend: Blend) -> None:
    with pytest.raises(ConfigError, match=r"sources\.pages\.augment\[0\]"):
        opened(shard_blend, [{"flop": 0.5}])
