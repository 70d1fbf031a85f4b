"""What a change of the blend is said to mean, against what the stream then does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megaresume.checkpoint.host import change_lines
from megaresume.stream.changes import outlook
from megaresume.stream.stream import Stream

LENGTHS = {"web": [40 + i % 50 for i in range(900)], "code": [100 + i % 9 for i in range(150)], "rest": [7] * 30}


def _data(unit: str, **weights: int) -> dict[str, Any]:
    sources = {name: {"weight": weights.get(name, 0)} for name in LENGTHS}
    return {"seq_length": 256, "packing": "best_fit", "blend": {"unit": unit}, "sources": sources}


@pytest.mark.parametrize("unit", ["tokens", "documents"])
def test_an_epoch_ends_about_where_it_is_said_to(stream_of: Callable[..., Stream], unit: str) -> None:
    stream = stream_of(_data(unit, web=3, code=1), LENGTHS)
    state = stream.state_at(60)
    for row in outlook(state, stream.config_at(60))[:2]:
        assert row.documents == state.sources[row.name].documents and row.samples_left is not None
        assert row.remaining == len(LENGTHS[row.name]) - state.sources[row.name].position % len(LENGTHS[row.name])
        near = [round(60 + factor * row.samples_left) for factor in (0.85, 1.15)]
        epochs = [stream.state_at(sample).sources[row.name].epoch for sample in near]
        assert epochs == [row.epoch, row.epoch + 1], row


def test_in_words(stream_of: Callable[..., Stream]) -> None:
    state = stream_of(_data("tokens", web=1, code=1), LENGTHS).state_at(60)
    assert change_lines(stream_of(_data("tokens", web=1, code=1), LENGTHS, state), 4) == []
    stream = stream_of(_data("tokens", web=3, code=1), LENGTHS)
    stream.on_change = "stage"
    stream.restore(state)
    _, head, web, _, rest = change_lines(stream, 4)
    assert head.split()[1:4] == ["source", "share", "seen"]
    assert "0.7500" in web and "steps from here" in web
    assert rest.split()[:2] == ["megaresume:", "rest"] and rest.endswith("not drawn")


def test_after_the_last_epoch(stream_of: Callable[..., Stream]) -> None:
    data = _data("tokens", web=3, code=1)
    data["sources"]["code"] |= {"max_epochs": 2, "on_exhausted": "drop"}
    stream = stream_of(data, LENGTHS)
    sample = next(n for n in range(60, 600, 4) if stream.state_at(n).sources["code"].exhausted)
    web, code, _ = outlook(stream.state_at(sample), stream.config_at(sample))
    assert (code.epoch, code.remaining, code.samples_left) == (2, 0, None)
    assert web.remaining and web.samples_left
