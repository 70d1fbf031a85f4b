"""What a source may be: no documents, empty documents, impossible ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megaresume.stream.config import SourceConfig, StreamConfig
from megaresume.stream.errors import ConfigError, CorpusError
from megaresume.stream.feed import MAX_DOCUMENT_TOKENS, DocumentFeed
from megaresume.stream.kernel import AHEAD_WIDTH
from megaresume.stream.order import SourceOrder
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList
from tests.stream.orders import order_of

StreamOf = Callable[..., Stream]


def _data(**source: Any) -> dict[str, Any]:
    return {"seq_length": 8, "packing": "none", "sources": {"web": source}}


def test_no_documents(stream_of: StreamOf) -> None:
    with pytest.raises(CorpusError, match="source 'web' has no documents") as error:
        stream_of(_data(), {"web": []})
    assert "weight 0" in str(error.value.action)


@pytest.mark.parametrize("num_documents", [1, 7, 5000])
@pytest.mark.parametrize("end", [{}, {"max_epochs": 1}, {"max_epochs": 2, "on_exhausted": "stop"}])
def test_only_empty_documents(stream_of: StreamOf, num_documents: int, end: dict[str, Any]) -> None:
    with pytest.raises(CorpusError, match="source 'web' has only empty documents") as error:
        stream_of(_data(**end), {"web": [0] * num_documents})
    assert f"{num_documents} documents, all without a token" in str(error.value.found)


def test_as_many_sources_as_the_config_has() -> None:
    config = StreamConfig.from_dict(_data())
    with pytest.raises(ConfigError, match="the number of sources") as error:
        Stream(config, [LengthList([3]), LengthList([4])])
    assert "2 sources" in str(error.value.found) and "1: web" in str(error.value.expected)


@pytest.mark.parametrize("length", [-1, -(2**40), MAX_DOCUMENT_TOKENS + 1])
def test_impossible_length(stream_of: StreamOf, length: int) -> None:
    lengths = [5] * 40
    lengths[17] = length
    with pytest.raises(CorpusError, match="source 'web' has a document of an impossible length") as error:
        stream_of(_data(), {"web": lengths}).plan(0, 40)
    assert f"document 17 with {length} tokens" in str(error.value.found)


def test_the_longest_document(stream_of: StreamOf) -> None:
    data = {"seq_length": 1 << 30, "sources": {"web": {"weight": 2**29}, "code": {}}}
    stream = stream_of(data, {"web": [MAX_DOCUMENT_TOKENS], "code": [1, MAX_DOCUMENT_TOKENS]})
    counts = stream.state_at(400).sources
    assert stream.plan(0, 400).tokens().tolist() == [1 << 30] * 400
    assert counts["web"].tokens / (counts["code"].tokens + 1) > 90


def _feed(lengths: list[int], **options: Any) -> tuple[DocumentFeed, SourceConfig]:
    return DocumentFeed(LengthList(lengths), "a"), SourceConfig(name="a", weight=1, **options)


def _walk(feed: DocumentFeed, config: SourceConfig, order: SourceOrder, num: int) -> list[list[int]]:
    out, rows, position = np.zeros((64, AHEAD_WIDTH), np.int64), [], 0
    while len(rows) < num and (filled := feed.fill(position, out, config, order)):
        rows += out[:filled].tolist()
        position = rows[-1][0] + 1
    return rows


def test_what_is_remembered_changes_nothing() -> None:
    """A feed asked again from a little behind gives what one gives that was never asked before."""
    lengths = [i % 3 for i in range(500)]
    (feed, config), out = _feed(lengths), np.zeros((64, AHEAD_WIDTH), np.int64)
    order = order_of(500, 1, "a")
    walked = _walk(feed, config, order, 2000)
    for position in (*range(1900, 1000, -1), *range(0, 2000, 3)):
        fresh = np.zeros((64, AHEAD_WIDTH), np.int64)
        filled = feed.fill(position, out, config, order)
        filled_fresh = _feed(lengths)[0].fill(position, fresh, config, order)
        common = min(filled, filled_fresh)
        assert common >= 1
        assert out[:common].tolist() == fresh[:common].tolist() == [r for r in walked if r[0] >= position][:common]


def test_an_end(caplog: pytest.LogCaptureFixture) -> None:
    for options in ({"max_epochs": 2}, {"max_epochs": 2, "on_exhausted": "stop"}):
        rows = _walk(*_feed([3, 0, 5], **options), order_of(3, 1, "a"), 100)
        assert [r[1] for r in rows] and sorted(r[1] for r in rows) == [0, 0, 2, 2]
    assert len(_walk(*_feed([3, 0, 5], max_epochs=2, on_exhausted="repeat"), order_of(3, 1, "a"), 100)) >= 100
    assert len(caplog.records) == 1
