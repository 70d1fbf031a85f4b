"""The compiled loop against the reference: every segment of every sample, and the digests."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.stream import data_yaml, kernel
from megaresume.stream.config import StreamConfig
from megaresume.stream.planner import Planner
from megaresume.stream.stages import Course
from megaresume.testing import LengthList
from tests.stream.conftest import MODES, SETTINGS
from tests.stream.reference import reference_digests, reference_samples

Configs = Callable[..., st.SearchStrategy[tuple[dict[str, Any], dict[str, list[int]]]]]

NUM_SAMPLES = 60


def _assert_equal(data: dict[str, Any], lengths: dict[str, list[int]], num_samples: int, at_once: int) -> int:
    """Plan ``at_once`` samples at a time and compare; returns how many samples there were."""
    config = StreamConfig.from_dict(data)
    reference = list(reference_samples(config, lengths, num_samples))
    planner = Planner(Course.of(config), [LengthList(lengths[s.name]) for s in config.sources])
    pieces = [sum(max(-(-n // config.seq_length), 1) for n in lengths[s.name]) for s in config.sources]  # of an epoch
    found, digests, hashes = [], [], set()
    while len(found) < num_samples:
        plan = planner.advance(min(at_once, num_samples - len(found)))
        if not len(plan):
            break
        for k in range(len(plan)):
            found.append(plan.table[plan.starts[k] : plan.starts[k + 1]].tolist())
            assert [[s.source, s.epoch, s.document, s.offset, s.length] for s in plan.segments(plan.first + k)] == [
                [i, position // pieces[i], *rest] for i, position, *rest in found[-1]
            ]
        assert plan.epochs().tolist() == [s.epoch for sample in plan for s in sample]
        assert plan.tokens().tolist() == [sum(s[4] for s in sample) for sample in found[plan.first : plan.stop]]
        digests += plan.digests.tolist()
        hashes.update(plan.hashes.tolist())
    # One by one: pytest explains how two long lists differ at the cost of minutes.
    for k, (sample, expected) in enumerate(zip(found, reference, strict=False)):
        assert sample == [list(s) for s in expected], f"sample {k}"
    assert len(found) == len(reference)
    assert digests == list(reference_digests(reference, list(lengths)))
    assert len(hashes) == len(found)  # no two samples of a stream are the same: positions go on
    assert planner.position == len(found)
    return len(found)


def test_every_mode_is_compared() -> None:
    """`kernel.advance` packs a mode that it does not know as another one, without a word."""
    assert list(get_args(data_yaml.PackingMode)) == list(data_yaml.MODES)
    assert sorted(kernel.MODE_NUMBERS) == sorted(SETTINGS) == sorted(data_yaml.MODES)
    assert sorted(kernel.MODE_NUMBERS.values()) == list(range(len(kernel.MODE_NUMBERS)))


@settings(max_examples=100)
@given(drawn=st.data(), at_once=st.sampled_from([1, 7, NUM_SAMPLES]))
@pytest.mark.parametrize("mode", MODES)
def test_kernel_equals_reference(mode: str, configs: Configs, drawn: st.DataObject, at_once: int) -> None:
    data, lengths = drawn.draw(configs(modes=[mode]))
    _assert_equal(data, lengths, NUM_SAMPLES, at_once)


@pytest.mark.parametrize("mode", ["best_fit", "split"])
@pytest.mark.parametrize("unit", ["tokens", "documents"])
def test_three_hundred_sources(mode: str, unit: str) -> None:
    rng = random.Random(300)
    names = [f"source {i}" for i in range(300)]
    data = {
        "seed": 300,
        "seq_length": 512,
        "packing": mode,
        "blend": {"unit": unit},
        "sources": {n: {"weight": rng.choice([0.001, 1, 1, 2, 0.37])} for n in names},
    }
    lengths = {n: [int(rng.lognormvariate(4, 1)) for _ in range(rng.choice([1, 2, 50]))] for n in names}
    for n in lengths.values():
        n[0] = max(n[0], 1)
    assert _assert_equal(data, lengths, 40, 40) == 40


def test_sources_that_are_nearly_used_up_together() -> None:
    """Equal sources come to the end of what was looked ahead at the same time, over and over."""
    rng = random.Random(20)
    lengths = {f"source {i}": [rng.randint(0, 200) for _ in range(rng.randint(150, 400))] for i in range(20)}
    data = {"seq_length": 512, "packing": "best_fit", "sources": {name: {} for name in lengths}}
    assert _assert_equal(data, lengths, 1000, 100) == 1000


def test_realistic_corpora() -> None:
    """Log-normal documents, many open bins, more documents than are looked ahead, several epochs of the smallest."""
    rng = random.Random(4)
    data = {
        "seq_length": 1024,
        "packing": {"mode": "best_fit", "open_bins": 16, "max_age": 64, "align": 8},
        "sources": {"web": {"weight": 6}, "code": {"weight": 3}, "books": {"weight": 1}},
    }
    mean = {"web": (3000, 5.0), "code": (300, 6.0), "books": (9, 8.5)}
    lengths = {name: [int(rng.lognormvariate(mu, 1)) for _ in range(n)] for name, (n, mu) in mean.items()}
    assert _assert_equal(data, lengths, 500, 200) == 500


@pytest.mark.parametrize("policy", ["drop", "stop"])
def test_the_end_of_a_stream(policy: str) -> None:
    """The open bins go out, the oldest first."""
    sources = {"a": {"max_epochs": 2}, "b": {"max_epochs": 1, "on_exhausted": policy}}
    data = {"seq_length": 64, "packing": {"mode": "best_fit", "open_bins": 8}, "sources": sources}
    lengths = {"a": [40, 50, 33, 45, 64, 60], "b": [35, 41, 100, 36]}
    assert _assert_equal(data, lengths, NUM_SAMPLES, 5) == {"drop": 17, "stop": 9}[policy]


def test_many_segments_in_a_sample() -> None:
    """Bins and the output grow while the loop runs."""
    for mode in ("best_fit", "split"):
        data = {"seq_length": 150, "packing": mode, "sources": {"a": {}, "b": {"weight": 0.01}}}
        assert _assert_equal(data, {"a": [1] * 50, "b": [1, 2, 149]}, 8, 3) == 8


def test_many_tiny_documents_need_few_bins() -> None:
    data = {"seq_length": 2100, "packing": {"mode": "best_fit", "open_bins": 4}, "sources": {"a": {}, "b": {}}}
    assert _assert_equal(data, {"a": [1, 2, 1, 2, 1, 1], "b": [2, 1, 1]}, 4, 3) == 4


def test_nothing_but_empty_documents_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one document may come at the start of an epoch and at the end of the next: two epochs' length apart."""
    monkeypatch.setattr("megaresume.stream.planner.LOOK_AHEAD_HIGH", 16)  # far less than an epoch
    lengths = {"a": [0] * 700}
    lengths["a"][123] = 7
    for seed in range(8):
        data = {"seed": seed, "seq_length": 8, "packing": "none", "sources": {"a": {}}}
        assert _assert_equal(data, lengths, 3, 3) == 3


@pytest.mark.process
def test_the_reference_needs_no_numpy() -> None:
    heavy = "{'numpy', 'numba', 'torch'}"
    code = f"import sys, tests.stream.reference; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
