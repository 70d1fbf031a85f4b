"""Small streams over lengths alone, and a strategy that draws them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st

from megaresume.stream import data_yaml
from megaresume.stream.config import StreamConfig
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList

StreamOf = Callable[..., Stream]
Lengths = dict[str, list[int]]
#: best_fit with sources that fill what it leaves free.
FILLED = "filled"
MODES = (*data_yaml.MODES, FILLED)
#: For each mode the settings that it has, and what is drawn for them: the kernel is compared with the reference there.
SETTINGS: Mapping[str, Mapping[str, Sequence[int]]] = {
    "best_fit": {"open_bins": [1, 2, 3, 8], "max_age": [1, 2, 5, 1000]},
    "knapsack": {"lookahead": [1, 2, 5, 12], "max_age": [1, 2, 5, 1000]},
    "split": {},
    "none": {},
}


def _stream_of(
    data: Mapping[str, Any], lengths: Mapping[str, Sequence[int]], state: StreamState | None = None
) -> Stream:
    """The stream of a data.yaml mapping whose sources have documents of the given lengths."""
    config = StreamConfig.from_dict(data)
    return Stream(config, [LengthList(lengths[s.name]) for s in config.sources], state=state)


@pytest.fixture(scope="session")
def stream_of() -> StreamOf:
    return _stream_of


@st.composite
def _configs(draw: st.DrawFn, modes: Sequence[str] = MODES) -> tuple[dict[str, Any], Lengths]:
    """(data.yaml mapping, lengths by source): all modes and policies, documents empty to three samples long."""
    seq_length = draw(st.sampled_from([1, 2, 8, 16, 60, 64]))
    mode = draw(st.sampled_from(modes))
    packing: dict[str, Any] = {
        "mode": "best_fit" if mode == FILLED else mode,
        "align": draw(st.sampled_from([a for a in (1, 2, 4, 5, 8) if seq_length % a == 0])),
    }
    packing |= {name: draw(st.sampled_from(values)) for name, values in SETTINGS[packing["mode"]].items()}
    sources: dict[str, Any] = {}
    lengths: Lengths = {}
    length = st.one_of(
        st.sampled_from([0, 0, 1, 2, max(seq_length - 1, 0), seq_length, seq_length + 1, 2 * seq_length]),
        st.integers(0, 3 * seq_length),
    )
    all_end = draw(st.booleans())
    for i in range(draw(st.sampled_from([1, 2, 3, 5, 12]))):
        name = f"s{i}"
        # Zero weights too, but not for all.
        sources[name] = {"weight": draw(st.sampled_from([0, 1, 1, 2, 3, 7] if i else [1, 2, 30]))}
        if all_end or draw(st.booleans()):
            sources[name]["max_epochs"] = draw(st.integers(1, 3))
            policies = ["drop", "drop", "stop", *([] if all_end else ["repeat"])]
            sources[name]["on_exhausted"] = draw(st.sampled_from(policies))
        lengths[name] = draw(st.lists(length, min_size=1, max_size=20))
        if mode == FILLED and (i == 0 or draw(st.booleans())):
            sources[name]["packing"] = "split"
            if draw(st.booleans()):  # so many that as many wait as can
                lengths[name] = [min(n, 2) for n in lengths[name]]
        if not any(lengths[name]):
            lengths[name][0] = 1
    data = {
        "seed": draw(st.integers(0, 2**64 - 1)),
        "seq_length": seq_length,
        "packing": packing,
        "blend": {"unit": draw(st.sampled_from(["tokens", "documents"]))},
        "sources": sources,
    }
    return data, lengths


@pytest.fixture(scope="session")
def configs() -> Callable[..., st.SearchStrategy[tuple[dict[str, Any], Lengths]]]:
    """Draw from it with ``data.draw(configs())``."""
    return _configs
