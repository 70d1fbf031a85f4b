"""Documents of similar lengths next to each other: a permutation of every epoch, the same wherever it is asked from."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from megaresume.stream.config import OnChange, StreamConfig
from megaresume.stream.data_yaml import GroupConfig
from megaresume.stream.errors import StateError
from megaresume.stream.order import SourceOrder
from megaresume.stream.source import PieceLists
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList, assert_exact_resume
from tests.stream.reference import permute


class Sized(LengthList):
    """Documents of one token, and of sizes by which they are grouped."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__([1] * len(sizes))
        self._sizes = np.array(sizes)

    def sizes(self, ids: Any) -> Any:
        return self._sizes[ids]


def sizes_of(num: int) -> list[int]:
    return [(k * 7919) % 97 + 1 for k in range(num)]


def slow_epoch(before: list[int], begin: int, epoch: int, sizes: list[int], group: GroupConfig, part: str = "") -> Any:
    """An epoch from position ``begin`` on, from the order before, with lists."""
    window, after = group.batch * group.window, []
    positions = range(begin, begin + len(before))
    for number in sorted({position // window for position in positions}):
        mine = [position for position in positions if position // window == number]
        batches = [[p for p in mine if p // group.batch == b] for b in sorted({p // group.batch for p in mine})]
        longest = sorted((before[p - begin] for p in mine), key=lambda document: -sizes[document])
        filled: dict[int, int] = {}
        for turn in range(len(batches)):
            batch = batches[permute(turn, len(batches), 5, "web", epoch, f"{part}batches at {mine[0]}")]
            filled |= {position: longest.pop(0) for position in batch}
        after += [filled[position] for position in mine]
    return after


def plain_epoch(num: int, epoch: int) -> list[int]:
    return [permute(k, num, 5, "web", epoch) for k in range(num)]


def order_of(num: int, group: GroupConfig | None, sizes: list[int]) -> SourceOrder:
    lists = PieceLists(Sized(sizes))
    return SourceOrder("web", 5, None, lists, (), group).revised(0, documents=num, piece=0)


@pytest.mark.parametrize(("batch", "window"), list(product([1, 3, 8], [1, 2, 5])))
@pytest.mark.parametrize("num", [1, 2, 7, 40, 101])
def test_whole_epochs_equal_the_slow_model(num: int, batch: int, window: int) -> None:
    group, sizes = GroupConfig(batch=batch, window=window), sizes_of(num)
    order = order_of(num, group, sizes)
    for epoch in range(3):
        expected = slow_epoch(plain_epoch(num, epoch), epoch * num, epoch, sizes, group)
        positions = np.arange(epoch * num, (epoch + 1) * num)
        assert sorted(expected) == list(range(num))
        assert order.pieces_at(positions)[0].tolist() == expected
        mixed = np.random.default_rng(epoch).permutation(positions)
        assert order.pieces_at(mixed)[0].tolist() == [expected[p - epoch * num] for p in mixed.tolist()]
        for document in range(num):
            assert order.positions_of(document, epoch) == [epoch * num + expected.index(document)]


def test_what_comes_into_an_epoch_that_has_begun() -> None:
    group, sizes = GroupConfig(batch=4, window=3), sizes_of(60)
    before = order_of(40, group, sizes)
    grown = before.revised(50, documents=60, piece=0, now=True, stage=1)  # after 10 of the second epoch
    old, begun = before.documents_at(np.arange(80)).tolist(), grown.documents_at(np.arange(100)).tolist()
    assert begun[:50] == old[:50] and sorted(begun[40:100]) == list(range(60))
    slots = [permute(k, 50, 5, "web", 1, "grown to 60 at 50") for k in range(50)]
    mixed = [old[50 + slot] if slot < 30 else 40 + slot - 30 for slot in slots]
    assert begun[50:] == slow_epoch(mixed, 50, 1, sizes, group, "grown to 60 at 50 ")
    for document in range(60):
        assert grown.positions_of(document, 1) == [40 + begun[40:].index(document)]


def test_steps_have_like_lengths_and_come_in_any_order() -> None:
    sizes = sizes_of(4000)
    order = order_of(4000, GroupConfig(batch=8, window=50), sizes).documents_at(np.arange(4000))
    steps = np.array(sizes)[order].reshape(-1, 8)
    assert (steps.max(1) - steps.min(1)).mean() < 3
    turns = steps.mean(1)[:50]
    assert abs(np.corrcoef(turns, np.arange(50))[0, 1]) < 0.4 and len(set(turns)) > 30


def stream(
    group: Any, state: StreamState | None = None, on_change: OnChange = "refuse", append: Any = None, num: int = 100
) -> Stream:
    source: dict[str, Any] = {"group_by_length": group, "append": append}
    config = {"seed": 5, "seq_length": 1, "packing": "none", "sources": {"web": source}}
    return Stream(StreamConfig.from_dict(config), [Sized(sizes_of(num))], state=state, on_change=on_change)


GROUP = {"batch": 8, "window": 4}


@pytest.mark.parametrize("append", [None, "next_epoch", "now"])
def test_a_stream_resumes_at_every_sample(append: Any) -> None:
    assert_exact_resume(lambda state: stream(GROUP, state), num_samples=230)
    if append:
        grown = stream(GROUP, stream(GROUP).state_at(140), append=append, num=130).state_at(150)
        assert_exact_resume(lambda state: stream(GROUP, state or grown, append=append, num=130), num_samples=230)


def test_the_run_keeps_its_batches_and_windows() -> None:
    whole = stream(GROUP).plan(0, 200).table.tolist()
    resumed = stream({"batch": 6, "window": 9}, stream(GROUP).state_at(77))
    assert resumed.plan(77, 200).table.tolist() == whole[77:]
    assert resumed.state_at(90).config["sources"]["web"]["group_by_length"] == GROUP


@pytest.mark.parametrize("on_change", ["refuse", "stage"])
@pytest.mark.parametrize(("before", "now"), [(GROUP, None), (None, GROUP)])
def test_switched_on_or_off_is_refused(before: Any, now: Any, on_change: OnChange) -> None:
    state = stream(before).state_at(20)
    with pytest.raises(StateError, match=r"group_by_length(.|\n)*the value that it had"):
        stream(now, state, on_change)
