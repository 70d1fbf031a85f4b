"""What Jupyter is shown of a state and of a plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.etree import ElementTree

from megaresume.stream.pictures import MOST
from megaresume.stream.stream import Stream

StreamOf = Callable[..., Stream]

DATA = {"seq_length": 64, "packing": "best_fit", "sources": {"<a>": {"weight": 3}, "b": {"weight": 1, "max_epochs": 2}}}
LENGTHS = {"<a>": [3, 40, 7, 12, 64, 90, 1, 33], "b": [10, 5, 64, 20]}


def rows(picture: str) -> list[list[str]]:
    """The words of its table; it is well-formed."""
    table = ElementTree.fromstring(picture).find("table")
    assert table is not None
    return [[" ".join("".join(cell.itertext()).split()) for cell in row] for row in table]


def test_a_state(stream_of: StreamOf) -> None:
    state = stream_of(DATA, LENGTHS).state_at(40)
    picture = state._repr_html_()
    head, a, b = rows(picture)
    drawn = {name: cursor.tokens for name, cursor in state.sources.items()}
    assert head[0] == "source" and a[:2] == ["<a>", f"{drawn['<a>']:,}"] and b[:2] == ["b", f"{drawn['b']:,}"]
    assert a[2] == f"{drawn['<a>'] / sum(drawn.values()):.1%} (75.0%)" and b[3] == "2.00 (ended)"
    assert f"{state.tokens / (40 * 64):.2%} of all positions filled" in picture and state.digest in picture


def test_a_state_of_two_lengths(stream_of: StreamOf) -> None:
    stages = [{"name": "long", "from_samples": 30, "seq_length": 128}]
    state = stream_of(DATA | {"stages": stages}, LENGTHS).state_at(40)
    room = 30 * 64 + 10 * 128
    assert f"{state.tokens / room:.2%} of all positions filled" in state._repr_html_()


def test_the_beginning_and_nothing(stream_of: StreamOf) -> None:
    stream = stream_of(DATA, LENGTHS)
    assert rows(stream.state_at(0)._repr_html_())[1][1:] == ["0", "0.0% (75.0%)", "0.00"]
    assert rows(stream.plan(5, 5)._repr_html_()) == [["source", "tokens", "share", "segments", "epoch"]]


def test_a_plan(stream_of: StreamOf) -> None:
    plan = stream_of(DATA, LENGTHS).plan(3, 30)
    picture = plan._repr_html_()
    ends = [segment for sample in plan for segment in sample if segment.source == 0]
    epochs = sorted({segment.epoch + 1 for segment in ends})
    tokens = sum(segment.length for segment in ends)
    assert rows(picture)[1][:2] == ["<a>", f"{tokens:,}"]
    assert rows(picture)[1][3:] == [str(len(ends)), f"{epochs[0]} to {epochs[-1]}"]
    assert "Samples 3 to 29" in picture and "27 samples" in picture


def test_many_sources(stream_of: StreamOf) -> None:
    names = [f"s{i}" for i in range(MOST + 6)]
    data = {"seq_length": 64, "sources": {name: {"weight": i + 1} for i, name in enumerate(names)}}
    stream = stream_of(data, {name: [20, 30, 40] for name in names})
    for picture in (stream.state_at(400)._repr_html_(), stream.plan(0, 400)._repr_html_()):
        assert len(rows(picture)) == MOST + 1 and "and 6 smaller sources" in picture
        assert rows(picture)[-1][0] == names[-1]


def test_it_follows_the_colours_of_the_page(stream_of: StreamOf) -> None:
    stream = stream_of(DATA, LENGTHS)
    for picture in (stream.state_at(40)._repr_html_(), stream.plan(0, 30)._repr_html_()):
        assert "currentColor" in picture and not re.search(r"background|color: *#|fill=\"(black|white)", picture)
