"""`megaresume.DataLoader`: skips, declared stages, and what a data.yaml says of a source, by the same words."""

from __future__ import annotations

import traceback
from itertools import islice
from typing import Any

import pytest

import megaresume
from megaresume.stream.changes import outlook
from megaresume.stream.errors import ConfigError, StateError, UsageError

ITEMS = 40
LARGE = range(100, 180)


def loader(dataset: Any = None, state: Any = None, **options: Any) -> Any:
    made = megaresume.DataLoader(
        list(range(ITEMS)) if dataset is None else dataset, collate_fn=list, **{"batch_size": 4} | options
    )
    if state is not None:
        made.load_state_dict(state)
    return made


def take(made: Any, batches: int) -> list[int]:
    handed: list[int] = []
    while batches > 0 and (some := list(islice(made, batches))):
        handed += [n for batch in some for n in batch]
        batches -= len(some)
    return handed


@pytest.fixture(scope="module")
def order() -> list[int]:
    return take(loader(), 30)


def blend(small: Any = 1, large: Any = 1) -> dict[str, Any]:
    return {"small": (list(range(ITEMS)), small), "large": (list(LARGE), large)}


def of_small(handed: list[int]) -> int:
    return sum(n < 100 for n in handed)


@pytest.mark.parametrize("skip", [["6:13"], {"samples": ["6:13"]}])
def test_samples_are_left_out_for_ever(order: list[int], skip: Any) -> None:
    left = order[:6] + order[13:]
    first = loader(skip=skip)
    assert take(first, 3) == left[:12]
    state = first.state_dict()
    assert take(loader(state=state), 20) == left[12:92]  # without being told again
    assert take(loader(state=state, skip=skip), 20) == left[12:92]
    late = loader(state=state, skip=["6:13", "20:24"])
    assert take(late, 5) == (left[:13] + left[17:])[12:32]


def test_an_epoch_with_samples_left_out_ends_where_it_ends(order: list[int]) -> None:
    made = loader(skip=["6:13"], batch_size=1)
    assert made.epoch_end == 33
    assert [n for batch in made for n in batch] == order[:6] + order[13:40]
    assert made.epoch == 1 and made.epoch_end == 73


def test_items_are_left_out(order: list[int]) -> None:
    made = loader(skip={"documents": {"data": [7, 9]}}, batch_size=1)
    assert made.epoch_end == 38
    assert [n for batch in made for n in batch] == [n for n in order[:40] if n not in (7, 9)]
    state = made.state_dict()
    assert take(loader(state=state, batch_size=1), 38) == [n for n in order[40:80] if n not in (7, 9)]


def test_a_stage_begins_at_a_sample() -> None:
    stages = [{"from_samples": 40, "weights": {"small": 3, "large": 1}}]
    whole = take(loader(blend(), stages=stages), 20)
    assert of_small(whole[:40]) == 20 and of_small(whole[40:]) == 30
    assert whole[:40] == take(loader(blend()), 10)
    first = loader(blend(), stages=stages)
    handed = take(first, 5)
    rest = take(loader(blend(), first.state_dict(), stages=stages, batch_size=10), 6)
    assert handed + rest == whole


def test_a_stage_begins_at_a_step_whatever_the_size_of_a_step_was() -> None:
    stages = [{"from_step": 15, "weights": {"small": 1, "large": 0}}]
    first = loader(blend(), stages=stages)
    take(first, 10)  # 40 samples; the five steps after them have 8
    rest = take(loader(blend(), first.state_dict(), stages=stages, batch_size=8), 8)
    assert of_small(rest[:40]) == 20 and of_small(rest[40:]) == 24


def test_a_stage_with_longer_samples() -> None:
    texts = [{"input_ids": [n] * 10} for n in range(400)]
    stages = [{"from_samples": 4, "seq_length": 40}]
    made = megaresume.DataLoader(texts, 2, seq_length=20, stages=stages, packing={"mode": "best_fit", "open_bins": 2})
    assert [batch["input_ids"].numel() for batch in islice(made, 4)] == [40, 40, 80, 80]


def test_what_a_source_says() -> None:
    stops = blend({"weight": 1, "max_epochs": 1, "on_exhausted": "stop"}, {"weight": 1})
    handed = take(loader(stops), 1000)
    assert of_small(handed) == ITEMS and ITEMS <= len(handed) - ITEMS <= ITEMS + 1
    grown = {"small": (list(range(ITEMS + 5)), {"append": "now"}), "large": (list(LARGE), 1)}
    first = loader(blend())
    take(first, 4)
    assert {40, 41, 42, 43, 44} <= set(take(loader(grown, first.state_dict()), 20))
    with pytest.raises(StateError, match="large"):
        loader(grown | {"large": (list(range(100, 190)), 1)}, first.state_dict())


def test_a_dataset_in_blocks() -> None:
    made = loader(list(range(1000)), shuffle=True)
    blocks = loader({"data": (list(range(1000)), {"shuffle": {"block": 10, "window": 2}})})
    handed = take(blocks, 250)
    assert sorted(handed) == sorted(take(made, 250)) == list(range(1000))
    assert len({n // 10 for n in handed[:20]}) == 2 != len({n // 10 for n in take(made, 5)})


@pytest.mark.parametrize(
    ("dataset", "options", "error", "words"),
    [
        (blend({"weigth": 3}), {}, ConfigError, "did you mean 'weight'"),
        (blend({"path": "x"}), {}, ConfigError, "unknown key 'path' in dataset 'small'"),
        (blend(), {"stages": [{"from_samples": 40, "weights": {"small": 3}}]}, ConfigError, "leaves sources out"),
        (None, {"stages": [{"from_samples": 40, "seq_length": 8}]}, UsageError, "packs items that are not packed"),
        (None, {"skip": ["8:3"]}, ConfigError, "8:3"),
        (None, {"skip": {"documents": {"other": [3]}}}, ConfigError, "other"),
        (None, {"skip": {"documents": {"data": [40]}}}, ConfigError, "40"),
    ],
)
def test_refused(dataset: Any, options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        loader(dataset, **options)


def test_an_epoch_that_began_before_items_were_added(order: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    """Where it is said to end is where it does, whatever waits for the next one."""
    first = loader(seed=1)
    take(first, 5)
    grown = loader(list(range(4 * ITEMS)), first.state_dict(), append="next_epoch", seed=1)
    (row,) = outlook(grown.stream.state_at(20), grown.stream.config_at(20))
    assert row.samples_left == ITEMS - 20 == next(grown.epoch_ends()) - 20


class Broken(list[int]):
    """Item 7 cannot be read."""

    def __getitem__(self, i: Any) -> Any:
        if i == 7:
            raise ZeroDivisionError("an empty picture")
        return list(range(i + 1))


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.process)])
def test_an_item_that_cannot_be_read_is_named(num_workers: int) -> None:
    """Torch keeps no notes of an exception in a worker, and has its words in the text instead."""
    with pytest.raises(ZeroDivisionError) as raised:
        loader({"pictures": (Broken(range(20)), 1)}, seq_length=32, lengths=len, num_workers=num_workers)
    told = "".join(traceback.format_exception(raised.value))
    assert "an empty picture" in told and "megaresume: item 7 of dataset 'pictures' was read" in told
