"""The stream as what a checkpoint saves: states, positions, refusals."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import stream_kit as kit

from megaresume.batches.open import open_stream
from megaresume.hosts.megatron.streams import StreamOrder, Streams
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import StateError
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream

EIGHT = BatchSchedule.constant(8)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("order")
    sources = {
        name: {"path": kit.write_corpus(directory / name, kit.documents(seed, 150))} for seed, name in enumerate("ab")
    }
    return {"seed": 3, "seq_length": 64, "packing": "best_fit", "sources": sources}


def stream_of(config: dict[str, Any]) -> Stream:
    return open_stream(config)


def order_of(
    stream: Stream, saved: Any = None, position: int = 0, schedule: BatchSchedule = EIGHT, **more: Any
) -> StreamOrder:
    streams = Streams(train=stream, valid=None, test=None)
    iteration = more.pop("iteration", position // 8)
    return StreamOrder(streams, saved=saved, position=position, iteration=iteration, schedule=schedule, **more)


def test_a_state_goes_on_exactly_there(config: dict[str, Any]) -> None:
    whole = stream_of(config).plan(0, 400)
    first = order_of(stream_of(config))
    first.stream.plan(0, 300)  # read ahead
    saved = StreamState.from_json(json.dumps(first.snapshot(160).to_dict()))
    again = order_of(stream_of(config), saved, 160)
    assert np.array_equal(again.stream.plan(160, 400).hashes, whole.hashes[160:])
    assert again.stream.digest_at(160) == first.stream.digest_at(160) == f"{int(whole.digests[159]):016x}"
    assert again.snapshot(240) == first.snapshot(240)
    assert again.stream.start == 160  # not planned from the start of the run: that would take as long as the run is
    assert again.origin == first.origin and again.origin is not None


def test_the_schedule_goes_on_behind_what_was(config: dict[str, Any]) -> None:
    saved = order_of(stream_of(config)).snapshot(160)
    again = order_of(stream_of(config), saved, 160, BatchSchedule.constant(20))
    assert again.schedule.segments == ((0, 8), (160, 20))
    assert again.snapshot(200).batches == ((0, 8), (160, 20))
    assert again.snapshot(160).batches == ((0, 8),)


@pytest.mark.parametrize("position", [80, 200, 0])
def test_an_overridden_iteration_moves_the_stream(config: dict[str, Any], position: int) -> None:
    """--override-ckpt-iteration: the counter is right, and the stream follows it."""
    saved = order_of(stream_of(config)).snapshot(160)
    again = order_of(stream_of(config), saved, position)
    assert again.stream.start == (160 if position > 160 else 0)
    expected = stream_of(config).plan(position, position + 50)
    assert np.array_equal(again.stream.plan(position, position + 50).hashes, expected.hashes)
    assert again.snapshot(position) == order_of(stream_of(config)).snapshot(position)


def test_no_state_is_no_fresh_start(config: dict[str, Any]) -> None:
    assert order_of(stream_of(config)).position == 0
    for position, iteration in ((80, 10), (0, 10), (80, 0)):
        with pytest.raises(StateError, match="no data state was restored") as error:
            order_of(stream_of(config), None, position, iteration=iteration)
        assert "--megaresume-mode guard" in str(error.value.action)
        assert "--finetune and another --save" in str(error.value.action)


def test_another_config_or_corpus_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    saved = order_of(stream_of(config)).snapshot(160)
    with pytest.raises(StateError, match="seed 4"):
        order_of(stream_of(config | {"seed": 4}), saved, 160)
    a = {"path": kit.write_corpus(tmp_path / "a", kit.documents(0, 151))}
    with pytest.raises(StateError, match=r"--split .* has grown by 1 documents"):
        order_of(stream_of(config | {"sources": config["sources"] | {"a": a}}), saved, 160)


def test_a_state_that_was_edited_is_refused(config: dict[str, Any]) -> None:
    state = order_of(stream_of(config)).snapshot(160)
    forged = state.replace(digest="0" * 16)
    with pytest.raises(StateError, match="is not at the sample where it was saved"):
        order_of(stream_of(config), forged, 80)


def test_a_save_has_little_left_to_plan(config: dict[str, Any]) -> None:
    """With worker processes nobody else plans in this process: the thread follows the counter."""
    order = order_of(stream_of(config))
    args = argparse.Namespace(consumed_train_samples=0)
    order.follow(args)
    args.consumed_train_samples = 5_000
    deadline = time.monotonic() + 120
    while order.stream._blocks.front < 5_000 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert 5_000 <= order.stream._blocks.front < 6_000
    assert order.snapshot(5_000) == order_of(stream_of(config)).snapshot(5_000)
    del order  # as an in-process restart does
    gc.collect()
    threads = [thread for thread in threading.enumerate() if thread.name == "megaresume-follow"]
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads)
