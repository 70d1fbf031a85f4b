"""What is plainly right is read without pydantic: exactly as pydantic reads it, and nothing else."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from megaresume.data.data_config import ValidationSet
from megaresume.data.shard_options import ImageFolderOptions
from megaresume.encoding.images.processors import Patches
from megaresume.encoding.images.rgb import Crop, ImageOptions
from megaresume.encoding.images.templates import Chat
from megaresume.stream.data_yaml import WrittenConfig
from megaresume.stream.schema import _plain, _UnsureError

CONFIG = {
    "seq_length": 4096,
    "seed": 7,
    "packing": {"mode": "best_fit", "open_bins": 8, "max_age": 3, "align": 2, "min_fragment": 9},
    "blend": {"unit": "documents"},
    "sources": {
        "web": {"path": "a", "weight": "3/10", "max_epochs": 2, "on_exhausted": "stop", "was": ["w"], "names": ["x"]},
        "shards": {"kind": "webdataset", "path": ["a", "b"], "shuffle": "blocks", "augment": [{"flip": 0.5}]},
        "items": {"kind": "items", "keyed": True, "group_by_length": {"batch": 4, "window": 8}, "packing": "split"},
        "short": "a path",
        "blocks": {"path": "c", "shuffle": {"block": 3, "window": 5}, "append": "now", "was": "old"},
    },
    "stages": [
        {"from_tokens": 10, "weights": {"web": 1}, "name": "later"},
        {"from_step": 99, "seq_length": 8, "packing": "knapsack"},
    ],
    "skip": {"steps": [1]},
}
#: read as each of these, with one value or two replaced by an odd one.
VALUES = {
    WrittenConfig: CONFIG,
    ValidationSet: {"sources": {"web": {"path": "a"}}},
    ImageFolderOptions: {"path": ["a"], "index": "b", "max_tokens": 4, "too_long": "error", "image_folder": "c"},
    Patches: {"size": 224, "patch": 14},
    Crop: {"scale": [0.5, 1.0], "ratio": [0.75, 1.5]},
    ImageOptions: {},
    Chat: {},
}
ODD = [None, True, 0, 1, -1, 1 << 70, 3.0, 0.5, math.nan, "", "3", "best_fit", b"x", [], [1], ["a"], (), {}, {"a": 1}]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys on the way to each value inside one."""
    yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield from places(one, (*at, key))


def put(value: Any, at: tuple[Any, ...], odd: Any) -> Any:
    if not at:
        return odd
    changed = copy.copy(value)
    changed[at[0]] = put(value[at[0]], at[1:], odd) if at[1:] else odd
    return changed


def variants(value: Any) -> Iterator[Any]:
    """It; with every value replaced by every odd one; without each; with one key more; with two replaced."""
    yield value
    random.seed(1)
    for at in places(value):
        for odd in ODD:
            changed = put(value, at, odd)
            yield changed
            yield put(changed, random.choice(list(places(changed))), random.choice(ODD))
        if at and isinstance(at[-1], str):
            yield put(value, (*at[:-1], "another"), 1)
            without = copy.deepcopy(value)
            inside = without
            for key in at[:-1]:
                inside = inside[key]
            del inside[at[-1]]
            yield without


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_plain_values_are_read_as_pydantic_reads_them(kind: Any) -> None:
    pydantics, plainly = TypeAdapter(kind).validate_python, _plain(kind)
    plain = 0
    for value in variants(VALUES[kind]):
        before = repr(value)
        try:
            found = repr(plainly(value))  # tells 1 from True and 1.0, and a list from a tuple
        except (_UnsureError, ValueError):
            continue
        plain += 1
        assert repr(value) == before
        assert found == repr(pydantics(value)), value
    assert plain


def test_what_pydantic_refuses_is_not_plain() -> None:
    pydantics, plainly = TypeAdapter(WrittenConfig).validate_python, _plain(WrittenConfig)
    refused = 0
    for value in variants(CONFIG):
        try:
            pydantics(value)
        except ValidationError:
            refused += 1
            with pytest.raises((_UnsureError, ValueError)):
                plainly(value)
    assert refused > 500
