"""States that are intact and yet impossible: each is refused, and says what contradicts what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megaresume.stream.errors import StateError
from megaresume.stream.state import Bin, Segment, SourceCursor, StreamState
from megaresume.stream.stream import Stream

DATA = {
    "seq_length": 64,
    "packing": {"mode": "best_fit", "open_bins": 3, "align": 4},
    "sources": {"web": {"weight": 2}, "code": {"weight": 1, "max_epochs": 40}},
}
LENGTHS = {"web": [3, 40, 7, 0, 12, 64, 50, 1, 33], "code": [130, 5, 64, 20]}

Edit = Callable[[StreamState], StreamState]


@pytest.fixture(scope="module")
def state(stream_of: Callable[..., Stream]) -> StreamState:
    stream = stream_of(DATA, LENGTHS)
    return next(s for s in map(stream.state_at, range(10, 80)) if len(s.bins) == 3 and not s.pending)


def _source(**changes: Any) -> Edit:
    def edit(state: StreamState) -> StreamState:
        web = state.sources["web"]
        changed = {k: f(web) for k, f in changes.items()}
        return state.replace(sources={**state.sources, "web": web._replace(**changed)})

    return edit


def _bins(change: Callable[[tuple[Bin, ...]], tuple[Bin, ...]]) -> Edit:
    return lambda state: state.replace(bins=change(state.bins))


def _with_segment(**changes: Any) -> Edit:
    def edit(state: StreamState) -> StreamState:
        first, *bins = state.bins
        segment = first.segments[0]._replace(**changes)
        return state.replace(bins=(Bin(opened_at=first.opened_at, segments=(segment, *first.segments[1:])), *bins))

    return edit


def _move_between_sources(state: StreamState) -> StreamState:
    """The sums stay right."""
    web, code = state.sources.values()
    web = web._replace(documents=web.documents - 1)
    code = code._replace(documents=code.documents + 1)
    return state.replace(sources={"web": web, "code": code})


def _reversed_sources(state: StreamState) -> StreamState:
    return state.replace(sources=dict(reversed(state.sources.items())))


EDITS: dict[str, tuple[Edit, str]] = {
    "a token too many": (lambda s: s.replace(tokens=s.tokens + 1), "tokens drawn from the sources"),
    "a document too few": (lambda s: s.replace(documents=s.documents - 1), "documents drawn from the sources"),
    "a bin lost": (_bins(lambda b: b[1:]), "tokens drawn from the sources"),
    "no bins": (_bins(lambda b: ()), "tokens drawn from the sources"),
    "a bin twice": (_bins(lambda b: (*b, b[-1])), "tokens drawn from the sources"),
    "bins swapped": (_bins(lambda b: b[::-1]), "bins opened at samples"),
    "an empty bin": (_bins(lambda b: (*b[:-1], Bin(opened_at=b[-1].opened_at, segments=()), b[-1])), "bins opened at"),
    "a bin of the future": (
        _bins(lambda b: (*b[:-1], Bin(opened_at=10**6, segments=b[-1].segments))),
        "opened at sample 1000000",
    ),
    "pending without tokens": (
        lambda s: s.replace(pending=(Segment(source=0, position=0, offset=3, length=0),)),
        "a segment of 0 tokens",
    ),
    "source that is none": (_with_segment(source=7), "a segment of 5 tokens of source 7|of source 7"),
    "segment not yet drawn": (_with_segment(position=10**6), "its last waiting segment at position 1000000"),
    "epoch": (_source(epoch=lambda c: c.epoch + 1), "source 'web' of 9 documents"),
    "position back": (_source(position=lambda c: c.position - 1), "source 'web' of 9 documents"),
    "skipped": (_source(skipped=lambda c: c.skipped + 1), "source 'web' of 9 documents"),
    "more in the stage than drawn": (_source(drawn_in_stage=lambda c: c.tokens + 1), "source 'web' of 9 documents"),
    "exhausted without an end": (_source(exhausted=lambda c: True), "source 'web' of 9 documents"),
    "between sources": (_move_between_sources, "source 'web' of 9 documents"),
    "sources in another order": (_reversed_sources, "sources code, web"),
}


@pytest.mark.parametrize(("edit", "found"), EDITS.values(), ids=EDITS.keys())
def test_contradiction(stream_of: Callable[..., Stream], state: StreamState, edit: Edit, found: str) -> None:
    edited = edit(state)
    assert edited.to_json() != state.to_json()
    # With the right checksum: what a faulty program would write.
    assert StreamState.from_json(edited.to_json()) == edited
    with pytest.raises(StateError, match="the data state contradicts itself") as error:
        stream_of(DATA, LENGTHS, edited)
    assert any(words in str(error.value.found) for words in found.split("|")), error.value
    assert error.value.expected and error.value.action


def test_past_the_end_of_a_source(stream_of: Callable[..., Stream]) -> None:
    data = {"seq_length": 4, "packing": "none", "sources": {"a": {"max_epochs": 2}}}
    state = stream_of(data, {"a": [4, 4]}).state_at(3)
    past = SourceCursor(position=5, epoch=2, documents=5, tokens=20, skipped=0, drawn_in_stage=20, exhausted=True)
    with pytest.raises(StateError, match="contradicts itself"):
        stream_of(data, {"a": [4, 4]}, state.replace(samples=5, documents=5, tokens=20, sources={"a": past}))


def test_an_open_bin_where_there_are_none(stream_of: Callable[..., Stream]) -> None:
    data = {"seq_length": 4, "packing": "none", "sources": {"a": {}}}
    state = stream_of(data, {"a": [2]}).state_at(3)
    segment = Segment(source=0, position=2, offset=0, length=2)
    edited = state.replace(documents=2, tokens=4, bins=(Bin(opened_at=2, segments=(segment,)),))
    with pytest.raises(StateError, match="contradicts itself") as error:
        stream_of(data, {"a": [2]}, edited)
    assert "at most 0" in str(error.value.expected)
