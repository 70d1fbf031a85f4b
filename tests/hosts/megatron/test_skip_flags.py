"""Flags that leave samples out: ours, and Megatron's own, which become samples of the stream once."""

from __future__ import annotations

import argparse
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaresume.hosts.megatron.arguments import Settings, add_arguments, skip_of
from megaresume.hosts.megatron.checks import check_flags
from megaresume.hosts.megatron.project import Project
from megaresume.hosts.megatron.streams import StreamOrder, Streams
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import ConfigError, UsageError
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList


def project(kind: Any) -> Project:
    return Project(kind=kind, root=Path(), version="0.16.1", modules={})


def _stream() -> Stream:
    config = StreamConfig.from_dict({"seq_length": 8, "packing": "split", "sources": {"a": {}}})
    return Stream(config, [LengthList([5, 9, 3, 7])])


def _order(args: SimpleNamespace, saved: object, position: int) -> StreamOrder:
    return StreamOrder(
        Streams(train=_stream(), valid=None, test=None),
        saved=saved,  # type: ignore[arg-type]
        position=position,
        iteration=position // 4,
        schedule=BatchSchedule.constant(4),
        skip=skip_of(args, Settings.from_args(args, []), from_0=False),
        end=lambda schedule: schedule.after(0, 100),
    )


def test_flags() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    words = "--megaresume-skip-samples 8:12 20:24 --skip-train-iteration-range 101-200 251-300"
    args = parser.parse_args(words.split())
    skip = skip_of(args, Settings.from_args(args, []), from_0=False)
    assert skip.samples == ((8, 12), (20, 24)) and skip.steps == ((101, 200), (251, 300))
    # As Megatron-DeepSpeed leaves it on args; as 0.16 and 0.17 count single iterations.
    args = SimpleNamespace(skip_train_iteration_range=deque([[101, 200]]), iterations_to_skip=[5, 7])
    assert skip_of(args, Settings(mode="stream"), from_0=True).steps == ((101, 200), (6, 6), (8, 8))
    assert skip_of(args, Settings(mode="stream"), from_0=False).steps == ((101, 200), (5, 5), (7, 7))


@pytest.mark.parametrize("word", ["200-101", "0-3", "a-b", "3-", "-3", "1-2-3"])
def test_malformed(word: str) -> None:
    with pytest.raises(ConfigError, match="bad range in --skip-train-iteration-range"):
        skip_of(SimpleNamespace(skip_train_iteration_range=[word]), Settings(mode="stream"), from_0=False)


def test_guard_cannot_leave_anything_out() -> None:
    args, stock = SimpleNamespace(skip_train_iteration_range=["5-7"]), project(kind="megatron-lm")
    with pytest.raises(UsageError, match="needs our stream"):
        check_flags(args, Settings(mode="guard"), stock)
    with pytest.raises(UsageError, match="needs our stream"):
        check_flags(SimpleNamespace(), Settings(mode="guard", skip_samples=("1:2",)), stock)
    check_flags(args, Settings(mode="guard"), project(kind="bigscience"))  # which has the flag itself
    check_flags(args, Settings(mode="stream"), stock)


def test_translated_once_and_restarted() -> None:
    args = SimpleNamespace(iterations_to_skip=[4], skip_train_iteration_range=["6-7"])
    first = _order(args, None, 0)
    state = first.snapshot(8)
    assert state.skips.ranges == ((12, 16), (20, 28))
    # The loop trains one step less of the data for each: sample 12 is what 16 would have been.
    assert first.stream.plan(12, 13).hashes == _stream().plan(16, 17).hashes
    assert first.stream.plan(16, 17).hashes == _stream().plan(28, 29).hashes
    for position in (8, 12, 16, 40):
        resumed = _order(args, first.snapshot(position), position)
        assert resumed.stream.accepted == () and resumed.stream.digest_at(60) == first.stream.digest_at(60)
    with pytest.raises(ConfigError, match="beyond the end"):
        _order(SimpleNamespace(iterations_to_skip=[101]), None, 0)
